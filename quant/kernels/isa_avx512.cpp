#include "simd_avx512.h"

#include "decode_impl.h"
#include "encode_impl.h"
#include "score_impl.h"

namespace embedserve {
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = {"avx512", gather, pool, encode, topk, rescore, pick, touch};
}  // namespace embedserve
