"""Commands of timm-gated, installed as the package `timm_gated_cli`

`__main__` lists them. Each module also runs as a script, `timm-gated evaluate`. The package is apart from
`timm_gated`, whose import takes seconds. Scripts for developers are in `tools/dev`, which is not installed.
"""
