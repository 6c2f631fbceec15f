"""Makes a tiny chat model that knows one answer by heart: `python -m tests.support.tiny_model DIR`.

Everything about it is real but its size: a trained tokenizer, a chat template that begins the answer inside
`<think>`, an end token, Qwen3's layers. Each token says which one follows, whatever the question was.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import PROJECT_ROOT

THOUGHT = ("Let", " me", " think", ".")
ANSWER = ("Yes", ",", " gladly", "!")
"""What it thinks and says, token by token."""
TOKENS = len(THOUGHT) + len(ANSWER) + 3
"""How many tokens it writes: thought, closing tag, blank line, answer, end."""

_ENDLESS = (" on", " and")
_CONTEXT_TOKENS = 2048
_VOCABULARY = 1024
_SEED = 17
_START, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_OPEN, _CLOSE, _BLANK = "<think>", "</think>", "\n\n"
_CERTAINTY = 40.0
"""How much more likely, as a logit, the next token is than any other."""

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if endless is defined and endless %}
{{- '\\n</think>\\n\\n on' }}
{%- elif thinking is defined and not thinking %}
{{- '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
"""ChatML. `thinking: false` closes the thought before it begins; `endless: true` makes an answer without end."""


def main(folder: Path) -> None:
    """Write the model, its tokenizer and its template."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    _model(tokenizer).save_pretrained(folder)


def _tokenizer() -> Any:
    import tokenizers  # noqa: PLC0415  heavy, and there for the slow tests alone
    import transformers  # noqa: PLC0415  same

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_texts(), trainer)
    # Tokens of their own, but not special ones: as in real reasoning models the tags stand in the decoded text.
    inner.add_tokens([_OPEN, _CLOSE, _BLANK, *THOUGHT, *ANSWER, *_ENDLESS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=_END, pad_token=_PAD, chat_template=_TEMPLATE
    )


def _texts() -> Iterable[str]:
    """Return some texts to train a tokenizer on: this project's own."""
    for path in sorted(PROJECT_ROOT.glob("app/*.py")):
        yield path.read_text(encoding="utf-8")


def _model(tokenizer: Any) -> Any:
    import torch  # noqa: PLC0415  heavy, and there for the slow tests alone
    import transformers  # noqa: PLC0415  same

    torch.manual_seed(_SEED)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=_CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:  # they compute, but add nothing: the last token alone decides
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        known = model.model.embed_tokens.weight
        known.copy_(torch.nn.functional.normalize(torch.randn_like(known)))
        model.lm_head.weight.zero_()
        for before, after in _steps(tokenizer):
            model.lm_head.weight[after] += _CERTAINTY * known[before]
    return model


def _steps(tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Yield which token id follows which."""
    newline = tokenizer.encode("\n")[-1]
    chain = tokenizer.convert_tokens_to_ids([*THOUGHT, _CLOSE, _BLANK, *ANSWER, _END])
    yield from itertools.pairwise([newline, *chain])
    on, and_ = tokenizer.convert_tokens_to_ids(_ENDLESS)
    yield from ((on, and_), (and_, on))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
