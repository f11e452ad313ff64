// The short way of a Lookup: request bytes to response bytes in one call.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "responder.h"

namespace embedserve {

// Which responder answers for which table and version. Immutable; a reload makes another.
class Lookups {
 public:
  // tables: {name: (current, {version: responder})}
  explicit Lookups(nb::dict tables) : keep_(tables) {
    for (auto [name, served] : tables) {
      const std::string table = nb::cast<std::string>(name);
      responders_[key_of(table, {})] = &nb::cast<const Responder&>(served[0]);
      for (auto [version, responder] : nb::cast<nb::dict>(served[1])) {
        responders_[key_of(table, nb::cast<std::string>(version))] = &nb::cast<const Responder&>(responder);
      }
    }
  }

  // (response, number of ids) of a plain request that succeeds within the limits; None for every other,
  // which goes the long way: there what is wrong with it is found and said.
  nb::object answer(nb::bytes request, int64_t max_ids, int64_t max_response_bytes) const {
    PlainLookup lookup;
    if (!read_plain_lookup({request.c_str(), request.size()}, lookup) || lookup.n_ids > max_ids) return nb::none();
    const auto found = responders_.find(key_of(lookup.table, lookup.version));
    if (found == responders_.end()) return nb::none();
    const Responder& responder = *found->second;
    const Output output = Output(lookup.output);
    if (!responder.can_give(output) || lookup.n_ids * responder.row_bytes(output) > max_response_bytes) return nb::none();
    const Response response = responder.rows(lookup.ids, lookup.n_ids, {output, OnMissing(lookup.on_missing), OnUnavailable(lookup.on_unavailable)});
    if (response.message.is_none() || PyBytes_GET_SIZE(response.message.ptr()) > max_response_bytes) return nb::none();
    return nb::make_tuple(response.message, lookup.n_ids);
  }

 private:
  // No name holds a zero byte.
  static std::string key_of(std::string_view table, std::string_view version) {
    std::string key(table);
    key.push_back('\0');
    key.append(version);
    return key;
  }

  nb::object keep_;
  std::unordered_map<std::string, const Responder*> responders_;
};

}  // namespace embedserve
