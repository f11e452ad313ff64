#include "simd_neon.h"

#include "decode_impl.h"
#include "encode_impl.h"
#include "score_impl.h"

namespace embedserve {
extern const Kernels kNeonKernels;
const Kernels kNeonKernels = {"neon", gather, pool, encode, topk, rescore, pick, touch};
}  // namespace embedserve
