"""Frameworks for training with Unbroken: one module each, which alone imports its framework.

Nothing is imported here. `unbroken.integrations.huggingface` needs transformers and accelerate, as the extra
`huggingface` names them.
"""
