"""Makes a tiny random target model of eight layers, and records for it: `python -m tests.support.tiny_states DIR`.

Unlike `tests.support.tiny_model` its layers do something, so that each has hidden states of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app import manifest
from app.ledger import Ledger, Pen
from app.places import dataset_folder
from app.records import Kind, KnownSample, Record, Usage, encode_line
from tests.support.exports import record
from tests.support.processes import PROJECT_ROOT, run_command
from tests.support.real_servers import _need

LAYERS, HIDDEN, POSITIONS = 8, 32, 512
AUXILIARY = [2, 4, 5]
"""EAGLE-3's rule for eight layers."""
VOCABULARY = 300
"""Ids below this are in the model's vocabulary."""
_SEED = 11
_MAKE_S = 150.0


def make_target_model(folder: Path) -> Path:
    """Return the folder of such a model, made in a process of its own."""
    _need(("torch", "transformers", "safetensors"), "pip install 'promptmill[extract]'")
    model = folder / "target"
    command = [sys.executable, "-m", "tests.support.tiny_states", str(model)]
    made = run_command(command, env={"OMP_NUM_THREADS": "1"}, cwd=PROJECT_ROOT, timeout_s=_MAKE_S)
    assert made.code == 0, made.stderr
    return model


def records(count: int, *, longest: int = 40, seed: int = 5) -> list[Record]:
    """Return records with random ids of different lengths."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(3, longest))]
        output = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, longest))]
        usage = Usage(len(prompt), len(output))
        one = record(f"s{number:03d}", dataset="chat", prompt_token_ids=prompt, output_ids=output, usage=usage)
        made.append(one)
    return made


def fill(prepared: Path, made: Sequence[Record], dataset: str = "chat") -> None:
    """Add records to a dataset as if they had been enqueued and answered."""
    with Ledger.open(dataset_folder(prepared, dataset)) as ledger:
        manifest.fix_content(ledger, dataset, {"max_tokens": 8192}, new=False)
        ledger.commit([Pen(Kind.PENDING, one.id, encode_line(KnownSample(id=one.id, row=1))) for one in made])
        ledger.commit([Pen(Kind.ACCEPTED, one.id, encode_line(one)) for one in made])


def reference(model: Any, ids: Sequence[int]) -> tuple[Any, Any]:
    """Return transformers' own states of one sequence alone.

    All of `output_hidden_states`, [layers + 1, tokens, hidden] (the last behind the final norm), and what goes into it.
    """
    import torch  # noqa: PLC0415  heavy, and there for the slow tests alone

    before = []
    hook = model.norm.register_forward_pre_hook(lambda _module, inputs: before.append(inputs[0]))
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    hook.remove()
    return torch.stack(output.hidden_states)[:, 0], before[0][0]


def main(folder: Path) -> None:
    """Write the model and a tokenizer with a chat template."""
    import torch  # noqa: PLC0415  heavy, and there for the slow tests alone
    import transformers  # noqa: PLC0415  same

    from tests.support.tiny_model import _tokenizer  # noqa: PLC0415

    tokenizer = _tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content + ",
        "('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if "
        "message.reasoning_content is defined and message.content != 'forgetful' else '') + message.content + ",
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(_SEED)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
