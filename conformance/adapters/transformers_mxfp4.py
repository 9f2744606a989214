"""transformers' reading of gpt-oss weights (``convert_moe_packed_tensors``), as ``mxfp4_decode``.

It reads blocks, so no scale rule is at stake.

Install: ``make matrix PACKAGES=transformers`` and add ``--adapter-python .venvs/transformers``.
"""

from importlib.metadata import version

try:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
except ImportError as error:
    raise ImportError(
        f"The adapter transformers_mxfp4 needs the package transformers ({error}). Install it with "
        "`make matrix PACKAGES=transformers` and add `--adapter-python .venvs/transformers`"
    ) from error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class GptOss:
    protocol = 1

    def describe(self) -> dict:
        formats = {name: {"storage": name, "accumulate": "float32"} for name in DTYPES}
        return {
            "name": "transformers",
            "version": version("transformers"),
            "url": "https://github.com/huggingface/transformers",
            "formats": formats["float32"],
            "policies": formats,
            "choices": {},
            "layouts": ["mtp"],
        }

    def start(self, config: dict, choices: dict, formats: dict | None = None) -> None:
        self.dtype = DTYPES[(formats or {}).get("storage", "float32")]

    def mxfp4_decode(self, inputs, *, cotangents=None, forced=None) -> dict:
        packed = inputs["packed"] if "packed" in inputs else inputs["codes"][..., ::2] | inputs["codes"][..., 1::2] << 4
        scales = torch.tensor(inputs["scales"])[None]  # one expert: [1, out, groups]
        blocks = torch.tensor(packed).reshape(*scales.shape, 16)
        values = convert_moe_packed_tensors(blocks, scales, dtype=self.dtype)  # [1, in, out]
        return {"values": values[0].T.float().numpy()}


adapter = GptOss()
