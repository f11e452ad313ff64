#include "simd_scalar.h"

#include "decode_impl.h"
#include "encode_impl.h"
#include "score_impl.h"

namespace embedserve {
extern const Kernels kScalarKernels;
const Kernels kScalarKernels = {"scalar", gather, pool, encode, topk, rescore, pick, touch};
}  // namespace embedserve
