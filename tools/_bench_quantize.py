"""Quantise an ONNX model to int8 with NNCF, for OpenVINO

    python -m timm_gated_cli._bench_quantize model.onnx images.npy model.xml

Post-training quantisation with NNCF's default settings, calibrated on the images. The benchmark runs this in a process
of its own: importing NNCF imports its torch extension, which must not affect the other runtimes.
"""
import sys

import numpy as np


def main(onnx_path: str, images_path: str, output: str) -> None:
    import nncf
    import openvino
    images = np.load(images_path)
    model = openvino.Core().read_model(onnx_path)
    quantized = nncf.quantize(model, nncf.Dataset([image[None] for image in images]), subset_size=len(images))
    openvino.save_model(quantized, output, compress_to_fp16=False)


if __name__ == '__main__':
    main(*sys.argv[1:])
