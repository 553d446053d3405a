"""Write nf4.safetensors: matrices that bitsandbytes 0.50.2 quantised to NF4 with double quantisation.

    pip install --no-deps --target /tmp/bnb bitsandbytes==0.50.2
    PYTHONPATH=/tmp/bnb python tests/data/make_nf4.py

Its torch kernels, which choose the nearest code as those for CUDA do: of the scales, the library that it has for CPU
chooses one in 500 a code beside the nearest. And with a row that is no whole blocks, that library dequantises wrongly.
"""

import ctypes
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

FILE = Path(__file__).with_name("nf4.safetensors")
SHAPES = {"a block": (1, 64), "blocks": (3, 128), "two scales of scales": (40, 448), "zeros": (2, 64)}


def main() -> None:
    with patch.object(ctypes.cdll, "LoadLibrary", side_effect=OSError("torch's kernels")):
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    found = {}
    for what, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(len(what))
            matrix = (0.02 * torch.randn(shape)).to(dtype)
            matrix[0, :64] = 0 if what == "zeros" else matrix[0, :64]
            pairs, state = quantize_4bit(matrix, compress_statistics=True, quant_type="nf4")
            found |= {
                f"{what} {str(dtype)[6:]} {name}": tensor.contiguous()
                for name, tensor in {
                    "matrix": matrix,
                    "pairs": pairs,
                    "absmax": state.absmax,
                    "nested_absmax": state.state2.absmax,
                    "offset": state.offset.view(1),
                    "dequantized": dequantize_4bit(pairs, state),
                }.items()
            }
    save_file(found, FILE)


if __name__ == "__main__":
    main()
