"""Public datasets by a short name: where they are, how their rows are read, and under which licence they come."""

from __future__ import annotations

import dataclasses
import difflib
import re

from producer.adapters.registry import AUTO
from producer.formats.hub import DEFAULT_SPLIT, HubReference

_REFERENCE = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(?::(?P<config>[^/@:\s]+))?(?:/(?P<split>[^/@:\s]+))?(?:@(?P<revision>[^@\s]+))?"
)


@dataclasses.dataclass(frozen=True)
class Preset:
    """One public dataset."""

    name: str
    hub: str
    """Its id on the Hugging Face Hub."""
    licence: str
    """The licence that its card names, and what else to know before publishing answers to it."""
    description: str
    """What its prompts are, in a line."""
    adapter: str = AUTO
    """How its rows are read; auto would choose the same."""
    configs: tuple[str, ...] = ()
    """The configs that are read one after another; empty for the dataset's default one."""
    split: str = DEFAULT_SPLIT
    splits: tuple[str, ...] = ()
    """Other splits worth knowing."""
    revision: str | None = None
    """The commit, branch or tag that is read; None is the newest."""
    gated: bool = False
    """Whether the terms have to be accepted on the hub first."""

    def reference(
        self, config: str | None = None, split: str | None = None, revision: str | None = None
    ) -> HubReference:
        """Return what is read from the hub, with what is given in the place of the preset's own."""
        return HubReference(
            self.hub,
            config or ",".join(self.configs) or None,
            split=split or self.split,
            revision=revision or self.revision,
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """A preset as a command line names it: `NAME[:config][/split][@revision]`."""

    preset: Preset
    reference: HubReference


_MATH_CONFIGS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)

PRESETS: tuple[Preset, ...] = (
    Preset(
        "open-perfectblend",
        "mlabonne/open-perfectblend",
        "Apache-2.0",
        "1.4 M chats, code, math and instructions; no ids; some rows have a system turn",
        "sharegpt",
    ),
    Preset(
        "ultrachat-200k",
        "HuggingFaceH4/ultrachat_200k",
        "MIT; written by ChatGPT",
        "200 k chats of several turns",
        "messages",
        split="train_sft",
        splits=("test_sft", "train_gen", "test_gen"),
    ),
    Preset(
        "sharegpt-vicuna",
        "Aeala/ShareGPT_Vicuna_unfiltered",
        "Apache-2.0; shared by users of ChatGPT",
        "chats of several turns; two files that repeat each other: repeats are refused as duplicates",
        "sharegpt",
    ),
    Preset(
        "glaive-v1",
        "glaiveai/glaive-function-calling",
        "Apache-2.0",
        "52 k chats with function calls, each one text",
        "glaive-v1",
    ),
    Preset(
        "glaive-v2",
        "glaiveai/glaive-function-calling-v2",
        "Apache-2.0",
        "113 k chats with function calls, each two texts",
        "glaive-v2",
    ),
    Preset(
        "opencode-instruct",
        "nvidia/OpenCodeInstruct",
        "CC-BY-4.0",
        "5 M coding tasks; all columns are texts, also average_test_score",
        "input",
        configs=("train",),
    ),
    Preset(
        "magicoder-oss",
        "ise-uiuc/Magicoder-OSS-Instruct-75K",
        "MIT; written by GPT-3.5",
        "75 k coding problems made from open-source code",
        "problem",
    ),
    Preset(
        "magicoder-evol",
        "ise-uiuc/Magicoder-Evol-Instruct-110K",
        "Apache-2.0; written by GPT-4",
        "110 k coding instructions",
        "instruction",
    ),
    Preset(
        "openthoughts-114k",
        "open-thoughts/OpenThoughts-114k",
        "Apache-2.0",
        "114 k math, science and code problems; each has a long system prompt about thinking (--drop-system)",
        "sharegpt",
        configs=("default",),
    ),
    Preset(
        "openthoughts3",
        "open-thoughts/OpenThoughts3-1.2M",
        "Apache-2.0",
        "1.2 M math, code and science problems; questions repeat (16 answers each), no ids",
        "sharegpt",
    ),
    Preset(
        "magpie-pro",
        "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        "Llama 3.1 Community License",
        "300 k instructions that Llama 3.1 70B made up",
        "sharegpt",
    ),
    Preset(
        "tulu-3",
        "allenai/tulu-3-sft-mixture",
        "ODC-BY-1.0; some parts are non-commercial (column source)",
        "939 k chats, math, code and safety prompts; some rows have a system turn",
        "messages",
    ),
    Preset(
        "llama-nemotron",
        "nvidia/Llama-Nemotron-Post-Training-Dataset",
        "CC-BY-4.0",
        "chat, code, math, science and safety; system prompts switch Llama-Nemotron's thinking (--drop-system)",
        "messages",
        configs=("SFT",),
        split="chat",
        splits=("code", "math", "science", "safety"),
    ),
    Preset(
        "nemotron-v1",
        "nvidia/Nemotron-Post-Training-Dataset-v1",
        "CC-BY-4.0",
        "25.7 M chats, code, math, science and tool calls",
        split="chat",
        splits=("code", "math", "stem", "tool_calling"),
    ),
    Preset(
        "hermes",
        "NousResearch/hermes-function-calling-v1",
        "Apache-2.0",
        "function calls, also parallel ones, with cached answers",
        "hermes",
        configs=("func_calling",),
    ),
    Preset(
        "xlam-60k",
        "Salesforce/xlam-function-calling-60k",
        "CC-BY-4.0; for research",
        "60 k single queries with tools",
        "xlam",
        gated=True,
    ),
    Preset(
        "toolace",
        "Team-ACE/ToolACE",
        "Apache-2.0",
        "11 k chats with tools in the system text and calls in brackets",
        "toolace",
    ),
    Preset(
        "gsm8k",
        "openai/gsm8k",
        "MIT",
        "7.5 k grade school math problems",
        "question",
        configs=("main",),
        splits=("test",),
    ),
    Preset(
        "math",
        "EleutherAI/hendrycks_math",
        "MIT",
        "7.5 k competition math problems in seven configs, all read",
        "problem",
        configs=_MATH_CONFIGS,
        splits=("test",),
    ),
    Preset(
        "codealpaca",
        "sahil2801/CodeAlpaca-20k",
        "CC-BY-4.0; written by text-davinci-003",
        "20 k coding instructions",
        "instruction",
    ),
    Preset(
        "alpaca",
        "tatsu-lab/alpaca",
        "CC-BY-NC-4.0: non-commercial",
        "52 k instructions",
        "instruction",
    ),
    Preset(
        "opc-sft-stage1",
        "OpenCoder-LLM/opc-sft-stage1",
        "MIT",
        "4.2 M instructions in three configs, all read",
        "instruction",
        configs=("filtered_infinity_instruct", "largescale_diverse_instruct", "realuser_instruct"),
    ),
    Preset(
        "opc-sft-stage2",
        "OpenCoder-LLM/opc-sft-stage2",
        "MIT",
        "436 k coding instructions in four configs, all read",
        "instruction",
        configs=("educational_instruct", "evol_instruct", "mceval_instruct", "package_instruct"),
    ),
    Preset(
        "swe-rebench-openhands",
        "nebius/SWE-rebench-openhands-trajectories",
        "CC-BY-4.0",
        "67 k traces of OpenHands on repositories: 30 to 100 tool turns each",
        "trajectory",
    ),
    Preset(
        "swe-agent",
        "nebius/SWE-agent-trajectories",
        "CC-BY-4.0",
        "80 k traces of SWE-agent, commands as text",
        "trajectory",
    ),
    Preset(
        "swe-smith",
        "SWE-bench/SWE-smith-trajectories",
        "MIT",
        "traces of SWE-agent on made-up bugs; messages are JSON text",
        "messages",
        split="tool",
        splits=("xml", "ticks"),
    ),
)


def find(source: str) -> Choice | None:
    """Return the preset that a source names as `NAME[:config][/split][@revision]`; None when it names none."""
    found = _REFERENCE.fullmatch(source)
    name = found["name"].casefold().replace("_", "-") if found else ""
    preset = next((one for one in PRESETS if one.name == name), None)
    if found is None or preset is None:
        return None
    return Choice(preset, preset.reference(found["config"], found["split"], found["revision"]))


def near(source: str) -> str | None:
    """Return the name of the preset that a misspelt source most likely means."""
    names = [preset.name for preset in PRESETS]
    return next(iter(difflib.get_close_matches(source.casefold(), names, n=1, cutoff=0.75)), None)
