"""Text for the prompts of a trace: common English words, made from the ids of blocks.

Used by `replay`. Pure, and the same in every process. Equal ids give equal text, so that prompts of one trace
share exactly the prefixes that its ids say.
"""

from __future__ import annotations

from hashlib import shake_128

from mooncake_lite.workloads.traces import TraceRequest

COMMON = """
the of and to in is was for that on as with by he at it from his an were are which this be has had her or not
but have one new first two their they its also who all been after more other she when would there some time
into only most over may than city then year many where such used no between up them can three will these made
while so during including him about what state part known both work out under well world second very day
before area team long began name if even use people left later same number each through being life against
own another game four much public since music school high book early house small group end old family north
around line water place country south great side law east film took set five just until home order any man
found town form system head back season power now times service company like last play best held came park
term total case river road night air body field force light king general art run point class based west main
must off local led few open son top six ten how go see help land sea big sun car blue green gold tree door
hand face eyes word story money food fish wood stone rock hill bird horse dog cat child girl boy woman mother
father friend heart mind truth voice song dance smile dream hope love peace summer winter spring morning
evening today yesterday table chair
"""

WORDS = COMMON.split()
"""256 words. Each is one token with the space before it for the default model, GPT-2, Llama 3 and the models
that use the vocabularies cl100k and o200k, such as Qwen."""


def text_of_block(block_id: int, tokens: int) -> str:
    """Return `tokens` words, each with a space before it. Fewer words are a prefix of more.

    The first eight words write the id with base 256, so texts of 8 words or more differ for all ids, and
    texts of n words for all ids below 256**n.
    """
    id_bytes = block_id.to_bytes(8, "little")
    numbers = id_bytes + shake_128(id_bytes).digest(max(0, tokens - 8))
    return "".join([" " + WORDS[number] for number in numbers[:tokens]])


def prompt_of(request: TraceRequest, block_tokens: int) -> str:
    """Return the text of a prompt: that of its blocks, one after the other."""
    ids, last = request.hash_ids, len(request.hash_ids) - 1
    rest = request.input_length - last * block_tokens
    full = [text_of_block(block_id, block_tokens) for block_id in ids[:last]]
    return "".join([*full, text_of_block(ids[last], rest)])
