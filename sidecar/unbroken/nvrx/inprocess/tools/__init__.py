"""The package that holds `inject_fault` in the extension."""

from unbroken.nvrx import inject_fault

__all__ = ["inject_fault"]
