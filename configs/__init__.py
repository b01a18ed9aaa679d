"""Training configs, installed as the package `timm_gated_configs` for `timm-gated configs`"""
