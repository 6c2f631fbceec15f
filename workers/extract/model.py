"""The target model: loaded once, run over padded batches, its hidden states caught as they pass by."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from app.errors import MillError, UsageError
from app.extraction import Layout, Plan, Precision

logger = logging.getLogger(__name__)

_NEEDED = ("torch", "transformers", "safetensors")
_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


class ModelUnusableError(MillError):
    """The target model cannot be loaded or read; the dataset waits until a person has done something."""


class OutOfMemoryError(Exception):
    """The device has too little memory for a batch; its words say how much was wanted, where the device tells."""


def require_packages() -> None:
    """Raise UsageError with what to install, where something is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"MILL_EXTRACT needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "pip install 'promptmill[extract]', or unset MILL_EXTRACT for a worker that asks model servers."
        )


class TargetModel:
    """A base model without its head, and catchers on the layers whose outputs are wanted."""

    def __init__(self, model: Any, num_layers: int) -> None:
        """Take a transformers model in eval mode.

        Raises ModelUnusableError where its layers cannot be found.
        """
        self._model = model
        self._layers = _decoder_layers(model, num_layers)
        self._device = next(model.parameters()).device

    @property
    def device(self) -> str:
        """Where the inputs go."""
        return str(self._device)

    def states(self, plan: Plan, sequences: Sequence[Sequence[int]]) -> list[Any]:
        """Return a CPU tensor [tokens, len(layers) + 1, hidden_size] for each sequence of ids, the last state at last.

        The last state is the model's output, behind its final norm. For speculators, which applies that norm itself, it
        is what goes into the norm. Padding stands behind the tokens, which look only back, so that it changes nothing.
        Raises OutOfMemoryError.
        """
        import torch  # noqa: PLC0415 heavy

        longest = max(map(len, sequences))
        ids = torch.zeros((len(sequences), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
            mask[row, : len(sequence)] = 1
        with translated(), torch.inference_mode():
            padded = not bool(mask.all())
            caught = self._run(plan, ids.to(self._device), mask.to(self._device) if padded else None)
            return [
                torch.stack([state[row, : len(sequence)].to("cpu") for state in caught], dim=1)
                for row, sequence in enumerate(sequences)
            ]

    def _run(self, plan: Plan, ids: Any, mask: Any) -> list[Any]:
        wanted = [layer - 1 for layer in plan.layers]  # what goes into a layer comes out of the one before
        pre_norm = plan.layout is Layout.SPECULATORS
        if pre_norm:
            wanted.append(len(self._layers) - 1)
        found: dict[int, Any] = {}
        with contextlib.ExitStack() as stack:
            for number in set(wanted):
                hook = self._layers[number].register_forward_hook(_catcher(found, number))
                stack.callback(hook.remove)
            output = self._model(input_ids=ids, attention_mask=mask, use_cache=False)
        states = [found[number] for number in wanted]
        return states if pre_norm else [*states, output.last_hidden_state]


def _catcher(found: dict[int, Any], number: int) -> Callable[..., None]:
    def catch(_module: Any, _inputs: Any, output: Any) -> None:
        found[number] = output[0] if isinstance(output, tuple) else output

    return catch


def _decoder_layers(model: Any, count: int) -> Any:
    """Return the list of the decoder's layers."""
    import torch  # noqa: PLC0415 heavy

    lists = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and name.split(".")[-1] in {"layers", "h"}
    ]
    if len(lists) != 1:
        raise ModelUnusableError(
            f"The {count} layers of {type(model).__name__} cannot be told from its other parts ({len(lists)} lists "
            "have that many); this kind of model is not supported."
        )
    return lists[0]


def load_model(plan: Plan, device: str | None) -> TargetModel:
    """Load the plan's model without its head.

    Raises ModelUnusableError, OutOfMemoryError.
    """
    import torch  # noqa: PLC0415 heavy
    import transformers  # noqa: PLC0415 heavy

    if not (Path(plan.model) / "config.json").is_file():
        raise ModelUnusableError(
            f"{plan.model} is not the folder of a model on this machine: it has no config.json; put the target model "
            "there."
        )
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where.startswith("cuda") and not torch.cuda.is_available():
        raise ModelUnusableError(f"MILL_DEVICE is {where}, and torch finds no CUDA device here; unset it, or say cpu.")
    dtype = torch.bfloat16 if plan.dtype is Precision.BF16 else torch.float32
    transformers.logging.set_verbosity_error()  # it would report that the head, which nobody wants, is not loaded
    transformers.logging.disable_progress_bar()
    logger.info("loading %s in %s onto %s", plan.model, plan.dtype, where)
    with translated():
        try:
            model = transformers.AutoModel.from_pretrained(
                plan.model,
                dtype=dtype,
                trust_remote_code=plan.trust_remote_code,
                local_files_only=True,
                device_map="auto" if where == "auto" else None,
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            first = str(error).strip().partition("\n")[0]
            raise ModelUnusableError(f"The model {plan.model} cannot be loaded: {first.rstrip('.')}.") from error
        model = _text_part(model).eval()
        return TargetModel(model if where == "auto" else model.to(where), plan.num_layers)


def _text_part(model: Any) -> Any:
    """Return the language model of one that also sees or hears."""
    find = getattr(model, "get_decoder", None)
    part = find() if callable(find) else None
    return model if part is None else part


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn what torch raises for want of memory into OutOfMemoryError."""
    import torch  # noqa: PLC0415 heavy

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(_first_sentence(error)) from error
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY):
            raise OutOfMemoryError(_first_sentence(error)) from error
        raise


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or "no memory left"


def free_cache() -> None:
    """Give memory that torch keeps for later back to the device."""
    import torch  # noqa: PLC0415 heavy

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
