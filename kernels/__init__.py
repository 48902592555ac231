"""LoRA kernels for mixture-of-experts layers."""
