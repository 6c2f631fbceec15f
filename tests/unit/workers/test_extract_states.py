"""The hidden states themselves: those of transformers, whatever the batch, in the form that each trainer reads."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.extraction import Layout, Plan, Precision, Reason, Refusal, SourceRecord
from app.extraction import Sequence as Tokens
from tests.support.tiny_states import AUXILIARY, HIDDEN, LAYERS, make_target_model, records, reference
from tests.unit.app.test_extraction import plan
from workers.extract.engine import Engine
from workers.extract.files import tensors_of, write_states
from workers.extract.model import ModelUnusableError, OutOfMemoryError, TargetModel, load_model
from workers.extract.tokens import Retokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the target model once."""
    return make_target_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def base(folder: Path) -> Any:
    """Load it as a user of transformers would."""
    import transformers  # noqa: PLC0415  heavy, and there for the slow tests alone

    return transformers.AutoModel.from_pretrained(folder).eval()


def target_plan(folder: Path, **fields: object) -> Plan:
    """Return a plan for the target model in fp32."""
    plain: dict[str, object] = {
        "model": str(folder),
        "layers": AUXILIARY,
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": 1000,
        "dtype": Precision.FP32,
    }
    return plan(**{**plain, **fields})


def sequences(count: int) -> list[list[int]]:
    """Return ids of different lengths."""
    return [[*(one.prompt_token_ids or []), *(one.output_ids or [])] for one in records(count)]


@pytest.mark.parametrize("layout", list(Layout))
def test_states_equal_those_of_transformers(folder: Path, base: Any, layout: Layout) -> None:
    """Alone or padded beside longer ones, each state is within 1e-5 of `output_hidden_states`.

    The last one is behind the final norm for SpecForge and Model-Optimizer, and before it for speculators.
    """
    import torch  # noqa: PLC0415  heavy

    one = target_plan(folder, layout=layout)
    model = load_model(one, "cpu")
    many = sequences(7)
    for batch in (many, many[:1]):
        for ids, found in zip(batch, model.states(one, batch), strict=True):
            states, before_norm = reference(base, ids)
            last = before_norm if layout is Layout.SPECULATORS else states[-1]
            expected = torch.stack([*(states[layer] for layer in AUXILIARY), last], dim=1)
            assert found.shape == (len(ids), 4, HIDDEN)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert not torch.allclose(states[-1], before_norm, atol=1e-2), "the norm does nothing here"


def test_files_are_what_specforge_reads(tmp_path: Path) -> None:
    """Its keys with a batch of one, three layers side by side, 64-bit integers, no more bytes than reckoned."""
    import torch  # noqa: PLC0415  heavy

    states = torch.randn(6, 4, HIDDEN)[:5].to(torch.bfloat16)
    path = tmp_path / "ab" / "s.ckpt"
    written = write_states(path, Layout.SPECFORGE, tensors_of(Layout.SPECFORGE, "s", Tokens([1, 2], [3, 4, 5]), states))
    read = torch.load(path, weights_only=True)
    assert list(read) == ["input_ids", "loss_mask", "hidden_state", "aux_hidden_state"]
    assert read["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert read["loss_mask"].tolist() == [0, 0, 1, 1, 1]
    assert read["loss_mask"].dtype == read["input_ids"].dtype == torch.long
    assert read["hidden_state"].shape == (1, 5, HIDDEN)
    assert read["aux_hidden_state"].shape == (1, 5, 3 * HIDDEN)
    assert torch.equal(read["hidden_state"][0], states[:, 3])
    assert torch.equal(read["aux_hidden_state"][0, :, HIDDEN : 2 * HIDDEN], states[:, 1])
    assert read["aux_hidden_state"].dtype == torch.bfloat16
    assert path.stat().st_size == written.bytes <= plan(hidden_size=HIDDEN).bytes_of(5)


def test_files_are_what_model_optimizer_reads(tmp_path: Path) -> None:
    """Its keys without a batch, and the conversation's id; torch loads it without trusting it."""
    import torch  # noqa: PLC0415  heavy

    states = torch.randn(3, 4, HIDDEN)
    path = tmp_path / "s.pt"
    write_states(path, Layout.MODELOPT, tensors_of(Layout.MODELOPT, "s", Tokens([1], [3, 4]), states))
    read = torch.load(path, weights_only=True)
    assert set(read) == {"input_ids", "hidden_states", "aux_hidden_states", "loss_mask", "conversation_id"}
    assert read["conversation_id"] == "s"
    assert read["hidden_states"].shape == (3, HIDDEN)
    assert torch.equal(read["aux_hidden_states"], states[:, :3].flatten(1))
    assert read["loss_mask"].tolist() == [0, 1, 1]
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_what_speculators_reads(tmp_path: Path) -> None:
    """All four states behind each other, and the ids that are compared with its rows."""
    import safetensors.torch  # noqa: PLC0415  heavy
    import torch  # noqa: PLC0415  heavy

    states = torch.randn(3, 4, HIDDEN)
    path = tmp_path / "hs_0.safetensors"
    write_states(path, Layout.SPECULATORS, tensors_of(Layout.SPECULATORS, "s", Tokens([1], [3, 4]), states))
    read = safetensors.torch.load_file(path)
    assert set(read) == {"hidden_states", "token_ids"}
    assert torch.equal(read["hidden_states"], states)
    assert read["token_ids"].tolist() == [1, 3, 4]


@pytest.fixture
def small_engine() -> Iterator[Engine]:
    """Start an engine whose device has memory for 60 tokens of a batch, padding included."""
    engine = Engine("cpu", load=_load_small)
    engine.start()
    yield engine
    engine.stop()


def _load_small(one: Plan, device: str | None) -> TargetModel:
    """Load the model onto a device with memory for 60 tokens."""
    import torch  # noqa: PLC0415  heavy

    def refuse(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].numel() > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")

    model = load_model(one, device)
    model._model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


def _ask(engine: Engine, one: Plan, ids: Sequence[int]) -> tuple[int, ...]:
    with engine.states(one, ids) as states:
        return tuple(states.tensor.shape)


def test_what_does_not_fit_is_tried_alone(small_engine: Engine, folder: Path) -> None:
    """A batch too large for the device costs nobody anything: each is run alone, and only the one too long fails."""
    one = target_plan(folder, batch_tokens=1000)
    lengths = [20, 25, 30, 61, 22, 28]
    with concurrent.futures.ThreadPoolExecutor(len(lengths)) as pool:
        asked = [pool.submit(_ask, small_engine, one, [1] * length) for length in lengths]
        for length, future in zip(lengths, asked, strict=True):
            if length > 60:
                with pytest.raises(
                    OutOfMemoryError, match=r"61 tokens alone do not fit cpu: CUDA out of memory\. Tried"
                ):
                    future.result(60)
            else:
                assert future.result(60) == (length, 4, HIDDEN)
    assert _ask(small_engine, one, [1] * 60) == (60, 4, HIDDEN)
    assert small_engine._held == 0


def test_a_model_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    """A folder without a model, or whose layers are others than planned, is one sentence."""
    with pytest.raises(ModelUnusableError, match="has no config"):
        load_model(target_plan(tmp_path), "cpu")
    with pytest.raises(ModelUnusableError, match="The 9 layers of Qwen3Model cannot be told"):
        load_model(target_plan(folder, num_layers=9), "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ModelUnusableError, match="cannot be loaded: "):
        load_model(target_plan(tmp_path), "cpu")


def test_ids_are_made_of_the_text_where_the_server_gave_none(folder: Path) -> None:
    """The template's own prompt and what it makes of the answer, marked; a thought that it drops is a refusal."""
    import transformers  # noqa: PLC0415  heavy

    one, maker = target_plan(folder, retokenize=True), Retokenizer()
    question = [{"role": "user", "content": "Is it raining?"}]
    made = maker.sequence(SourceRecord(id="a", messages=question, reasoning="Let me see.", content="No."), one)
    assert isinstance(made, Tokens)
    assert made.retokenized
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (
        tokenizer.decode(made.prompt) == "<|im_start|>user\nIs it raining?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert tokenizer.decode(made.output) == "Let me see.\n</think>\n\nNo.<|im_end|>\n"
    bare = maker.sequence(SourceRecord(id="b", messages=question, content="No."), one)
    assert isinstance(bare, Refusal)
    assert bare.reason is Reason.CANNOT_TOKENIZE
    lost = maker.sequence(SourceRecord(id="c", messages=question, reasoning="Hm.", content="forgetful"), one)
    assert lost == Refusal(Reason.LOST_THOUGHT, "the chat template leaves out the answer's reasoning, or changes it")
