// What the extension modules share of Python: buffers, the GIL, and checked enums.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>

namespace embedserve {

namespace nb = nanobind;

// Any contiguous buffer: bytes, memoryview, numpy array.
class Buffer {
 public:
  Buffer(nb::handle object, const char* name, size_t item, bool writable = false) {
    const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    if (size_t(view_.len) % item != 0) {
      const std::string message = std::string(name) + ": " + std::to_string(view_.len) +
          " bytes are not a whole number of " + std::to_string(item) + "-byte items";
      PyBuffer_Release(&view_);
      throw nb::value_error(message.c_str());
    }
    items_ = int64_t(size_t(view_.len) / item);
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  int64_t items() const { return items_; }

 private:
  Py_buffer view_;
  int64_t items_ = 0;
};

// A buffer that may be absent.
class MaybeBuffer {
 public:
  MaybeBuffer(nb::handle object, const char* name, size_t item) {
    if (!object.is_none()) buffer_ = std::make_unique<Buffer>(object, name, item);
  }
  uint8_t* data() const { return buffer_ ? buffer_->data() : nullptr; }
  int64_t items() const { return buffer_ ? buffer_->items() : 0; }
  void expect(int64_t n, const char* name) const {
    if (buffer_ && buffer_->items() != n) {
      throw nb::value_error((std::string(name) + ": expected " + std::to_string(n) + " items, got " + std::to_string(buffer_->items())).c_str());
    }
  }

 private:
  std::unique_ptr<Buffer> buffer_;
};

// Releases the GIL for work on this many bytes or more. Below it the work takes some microseconds, less than
// another thread needs to take the lock and hand it back.
class Unlocked {
 public:
  explicit Unlocked(int64_t work_bytes) {
    if (work_bytes >= (int64_t(128) << 10)) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

template <class Enum>
Enum checked(int value, int last, const char* name) {
  if (value < 0 || value > last) throw nb::value_error((std::string(name) + " out of range").c_str());
  return Enum(value);
}

}  // namespace embedserve
