"""Placement policies, one per file. Each chooses where a request is prefilled and decoded."""

from scheduler.placement.contract import Candidate, Policy
from scheduler.placement.least_tokens import LeastTokens

POLICIES: dict[str, type[Policy]] = {LeastTokens.name: LeastTokens}
"""By the names that configurations use."""

__all__ = ["POLICIES", "Candidate", "LeastTokens", "Policy"]
