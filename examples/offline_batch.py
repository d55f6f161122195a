"""Answer a batch of prompts in this process. The first run downloads the default model (98 MB).

python examples/offline_batch.py
"""

from mooncake_lite import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The three primary colours are", "To boil an egg,"]


def main() -> None:
    """Print each prompt with its answer. All prompts share the forward passes of one running batch."""
    llm = LLM()
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
        answer = output.outputs[0]
        print(
            f"{output.prompt!r}\n    {answer.text!r} ({answer.finish_reason}, {len(answer.token_ids)} tokens)"
        )


if __name__ == "__main__":
    main()
