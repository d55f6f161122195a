"""What a plan costs: prices of machines in, money per million tokens out.

prefill_node_hour = 32.0      # of a node that prefills
decode_node_hour = 32.0
dram_gb_hour = 0.004          # of each GB that is lent to the pool; 0 unless given
currency = "USD"
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from mooncake_lite.config.plain_text import plain_text
from mooncake_lite.errors import ConfigError
from mooncake_lite.planner.jobs import Jobs
from mooncake_lite.planner.limits import Nodes


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of an hour. Without a file, a node costs 1 and memory nothing: costs are hours of nodes."""

    prefill_node_hour: float = 1.0
    decode_node_hour: float = 1.0
    dram_gb_hour: float = 0.0
    currency: str = "node hours"

    def __post_init__(self) -> None:
        numbers = (self.prefill_node_hour, self.decode_node_hour, self.dram_gb_hour)
        if not all(0 <= one < 1e12 for one in numbers):
            raise ValueError("prices must be 0 or more")


class Cost(msgspec.Struct, frozen=True):
    """Money. per_hour: of the cluster; per million tokens of prompts, and of answers."""

    per_hour: float
    per_million_input: float
    per_million_output: float


def read_prices(path: Path) -> Prices:
    """Read a file of prices. Raises ConfigError."""
    try:
        return msgspec.convert(tomllib.loads(plain_text(path.read_bytes()).decode()), Prices)
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def cost_of(prices: Prices, nodes: Nodes, dram_bytes: int, jobs: Jobs) -> Cost:
    """Return what a cluster costs that serves these requests at their rate.

    Nodes that prefill, and the DRAM that they lend, are paid by the tokens of prompts, reused ones too; nodes
    that decode by those of answers.
    """
    prefill = nodes[0] * (prices.prefill_node_hour + dram_bytes / 1e9 * prices.dram_gb_hour)
    decode = nodes[1] * prices.decode_node_hour
    prompts, answers = (3600 * jobs.rate * float(each.mean()) / 1e6 for each in (jobs.tokens, jobs.answer))
    return Cost(prefill + decode, prefill / prompts, decode / answers)
