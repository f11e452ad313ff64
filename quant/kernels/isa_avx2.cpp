#include "simd_avx2.h"

#include "decode_impl.h"
#include "encode_impl.h"
#include "score_impl.h"

namespace embedserve {
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = {"avx2", gather, pool, encode, topk, rescore, pick, touch};
}  // namespace embedserve
