"""Checks every object of a store that a reader relies on, and reports all problems."""

from trajstore.store.verify.report import VerifyNote, VerifyProblem, VerifyReport
from trajstore.store.verify.verification import verify

__all__ = ["VerifyNote", "VerifyProblem", "VerifyReport", "verify"]
