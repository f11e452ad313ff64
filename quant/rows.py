"""Row formats by name. The bytes are specified, and made, in kernels/row_format.h."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from embedserve.quant.kernels import _native


class RowType(str, Enum):
    """How a row's values are stored: `bits` of the import command by name."""

    INT8 = "int8"
    INT4 = "int4"
    FP16 = "fp16"
    FP32 = "fp32"

    @classmethod
    def of_bits(cls, bits: int) -> RowType:
        return {8: cls.INT8, 4: cls.INT4, 16: cls.FP16, 32: cls.FP32}[bits]

    @property
    def native(self) -> int:
        return list(RowType).index(self)

    @property
    def is_integer(self) -> bool:
        return self in (RowType.INT8, RowType.INT4)


class Scheme(str, Enum):
    """Where the codes' zero lies: at the row's minimum, or in the middle (value 0 is exact)."""

    ASYMMETRIC = "asymmetric"
    SYMMETRIC = "symmetric"

    @property
    def native(self) -> int:
        return list(Scheme).index(self)


class Calibration(str, Enum):
    """Which range of a row's values the codes span.

    minmax: all of it. percentile: 0.1 % clipped at each end. mse: the range with the least squared
    error, by the greedy search of Guan et al., "Post-Training 4-bit Quantization on Embedding Tables", 2019.
    """

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"

    @property
    def native(self) -> int:
        return list(Calibration).index(self)


class Metric(str, Enum):
    """TopK's score. ip: dot product. l2: negative squared distance. cosine: of the angle, 0 for a zero vector."""

    IP = "ip"
    L2 = "l2"
    COSINE = "cosine"

    @property
    def native(self) -> int:
        return list(Metric).index(self)


class Output(IntEnum):
    """What Lookup returns; the numbers are those of the wire and of the kernels."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    QUANTIZED = 3


@dataclass(frozen=True)
class RowFormat:
    """A table's row bytes. `wide` rows carry scale and bias in FP32 instead of FP16."""

    type: RowType
    wide: bool
    dim: int

    @property
    def stride(self) -> int:
        """Bytes of one row, a multiple of 4."""
        return int(_native.stride(self.type.native, self.wide, self.dim))
