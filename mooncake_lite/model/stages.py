"""The stages of a pipeline: which layers of a model each rank of an instance holds.

Used by `sizes.py`, `forward.py` and the engines. Explained in docs/explain/layer-wise-prefill.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mooncake_lite.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, of a whole model where there is one alone.

    number   0 for the first stage, which embeds tokens; the last one makes logits
    """

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Tell whether it embeds tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Tell whether it makes logits."""
        return self.number == self.count - 1

    def layers(self, model: ModelConfig) -> range:
        """Return the layers that it holds. Where they cannot be shared evenly, the first stages hold more."""
        each, more = divmod(model.layers, self.count)
        first = self.number * each + min(self.number, more)
        return range(first, first + each + (self.number < more))

    def part_of(self, model: ModelConfig) -> ModelConfig:
        """Return the sizes of a model that has these layers alone."""
        layers = self.layers(model)
        return replace(model, layers=len(layers), windows=model.windows[layers.start : layers.stop])


WHOLE = Stage()
"""The one stage of an instance of one rank."""
