"""Ask three questions about one document, and see how much of each prompt's KV was reused.

python examples/reuse.py                          in this process: reuse from the rank's own pages
python examples/reuse.py http://127.0.0.1:8000    from a running cluster: also from its pool
"""

import sys
import time

from mooncake_lite import LLM, SamplingParams

DOCUMENT = (
    "Rule 1: the key of a KV block is a hash of its tokens and of the key of the block before it. " * 12
)
QUESTIONS = ["What is a key?", "What comes before a block?", "What is a key?"]


def main() -> None:
    """Print a line for each question. The first one computes the document, the others reuse it."""
    llm = LLM(cluster=sys.argv[1]) if len(sys.argv) > 1 else LLM()
    for question in QUESTIONS:
        conversation = [{"role": "user", "content": f"{DOCUMENT}\n{question}"}]
        began = time.perf_counter()
        (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=8))
        seconds = time.perf_counter() - began
        print(f"{output.num_cached_tokens} of {output.num_prompt_tokens} tokens reused, {seconds:.2f} s")


if __name__ == "__main__":
    main()
