"""Text for the prompts of a trace: common English words, made from the ids of blocks.

Used by `replay`. Pure, and the same in every process. Equal ids give equal text, so that prompts of one trace
share exactly the prefixes that its ids say.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128

from mooncake_lite.errors import ConfigError
from mooncake_lite.workloads.traces import BLOCK_TOKENS, TraceRequest

COMMON = """
of to in is on as by he at it an be or no up so if go do us me my we the and was for his are has had her not
but one new two its who all she may can him men day way our out any own old end off set few how get got see
say saw did let put run use why yes add act age ago air art ask bad bag bar bed big bit box boy bus buy car
cat cup cut dog dry due ear eat egg eye fan far fit fix fly fun gas gap hat hit hot ice job joy key kid law
lay leg lie lot low man map max mix net nor now oil pay pen per pet pie pot red row sea sit six sky son sun
tax tea ten tie tip top toy try van wet win won yet you that with from were this have been more when time
into only most over than city then year such used them your they what will also back best body book both call
came card care case come cost dark data date days deal deep done door down each east easy else even ever face
fact fall fast feel feet felt file film find fine fire firm fish five food foot form four free full game gave
girl give goes gold gone good grow half hall hand hard head hear heat held help here high hill hold home hope
hour idea just
"""

WORDS = COMMON.split()
"""256 words. Each is one token with the space before it for the default model, GPT-2, Llama 3 and the models
that use the vocabularies cl100k and o200k, such as Qwen."""

ID_TOKENS = 8
"""Words that write an id with base 256."""

PLACE_BITS = 32
"""Of an id that `rescale` has numbered for shorter blocks: its place among the blocks that follow the same
block. The bits above make the id unique."""


def text_of_block(block_id: int, tokens: int) -> str:
    """Return `tokens` words, each with a space before it. Fewer words are a prefix of more.

    The first eight words write the id with base 256, so texts of 8 words or more differ for all ids, and
    texts of n words for all ids below 256**n. For shorter blocks see PLACE_BITS.
    """
    id_bytes = block_id.to_bytes(ID_TOKENS, "little")
    numbers = id_bytes + shake_128(id_bytes).digest(max(0, tokens - ID_TOKENS))
    return "".join([" " + WORDS[number] for number in numbers[:tokens]])


def prompt_of(request: TraceRequest, block_tokens: int) -> str:
    """Return the text of a prompt: that of its blocks, one after the other. Raises as check_distinct does."""
    check_distinct([request], block_tokens)
    ids, last = request.hash_ids, len(request.hash_ids) - 1
    rest = request.input_length - last * block_tokens
    full = [text_of_block(block_id, block_tokens) for block_id in ids[:last]]
    return "".join([*full, text_of_block(ids[last], rest)])


def check_distinct(
    requests: Sequence[TraceRequest], block_tokens: int, whole_tokens: int = BLOCK_TOKENS
) -> None:
    """Raise ConfigError where blocks are too short for texts that differ wherever the trace's prefixes do.

    whole_tokens   of a block before lengths were divided
    """
    if 8 * block_tokens >= PLACE_BITS:
        return
    last = max(max(request.hash_ids) % 2**PLACE_BITS for request in requests)
    tokens = 1
    while last >= 256**tokens:
        tokens *= 2
    if tokens > block_tokens:
        raise ConfigError(
            f"lengths cannot be divided by {whole_tokens // block_tokens}: {last + 1:,} blocks of the trace "
            f"follow the same block, and a block of that length has one of {256**block_tokens:,} texts; "
            f"divide by {whole_tokens // tokens} at most"
        )
