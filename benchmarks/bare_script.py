"""The script that people write instead: AsyncOpenAI, a semaphore, and an append with a flush. The baseline for CPU.

python benchmarks/bare_script.py PROMPTS.jsonl ANSWERS.jsonl BASE_URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

CONCURRENCY = 128


async def main(prompts: list[str], answers: Path, base_url: str) -> None:
    """Ask every prompt and append its answer as soon as it is there."""
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none")
    semaphore = asyncio.Semaphore(CONCURRENCY)
    model = (await client.models.list()).data[0].id
    with answers.open("a", encoding="utf-8") as file:

        async def ask(number: int, prompt: str) -> None:
            messages = [{"role": "user", "content": prompt}]
            async with semaphore:
                answer = await client.chat.completions.create(
                    model=model,
                    messages=messages,  # type: ignore[arg-type] # as in the scripts that this one stands for
                    max_tokens=8192,
                )
            choice = answer.choices[0]
            record = {
                "id": number,
                "messages": messages,
                "content": choice.message.content,
                "reasoning": getattr(choice.message, "reasoning", None),
                "finish_reason": choice.finish_reason,
                "usage": answer.usage.model_dump() if answer.usage else None,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()

        await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    asyncio.run(main([json.loads(line)["prompt"] for line in lines], Path(sys.argv[2]), sys.argv[3]))
