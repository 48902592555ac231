"""Check a shard set against the adapter it was made from."""

from typing import Any

__all__ = ["VerifyReport", "self_test", "verify", "verify_several"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something is verified."""
    if name == "verify":
        from moelora.validate.run import verify

        return verify
    if name == "verify_several":
        from moelora.validate.several import verify_several

        return verify_several
    if name == "self_test":
        from moelora.validate.try_faults import self_test

        return self_test
    if name == "VerifyReport":
        from moelora.validate.report import VerifyReport

        return VerifyReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
