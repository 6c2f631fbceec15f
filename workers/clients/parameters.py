"""The request parameters of each model server and protocol, and the sentence about one that it does not know.

Taken from the sources of late 2026 (vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, transformers 5.24) and, for llama.cpp, from
what its library reads. A name is listed only where the server acts on it, not where it accepts and passes over it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOKEN_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})

_OPENAI = TOKEN_LIMITS | _names(
    "model messages tools tool_choice parallel_tool_calls temperature top_p seed stop frequency_penalty "
    "presence_penalty logit_bias logprobs top_logprobs response_format reasoning_effort"
)

VLLM = _OPENAI | _names(
    "top_k min_p repetition_penalty length_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs "
    "logprob_token_ids allowed_token_ids bad_words use_beam_search echo add_generation_prompt continue_final_message "
    "add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs "
    "structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids return_prompt_text "
    "return_weight_versions cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection "
    "thinking_token_budget include_reasoning watermarking"
)

SGLANG = _OPENAI | _names(
    "top_k min_p repetition_penalty min_tokens regex ebnf stop_token_ids stop_regex no_stop_trim ignore_eos "
    "continue_final_message skip_special_tokens lora_path session_id session_params separate_reasoning "
    "chat_template_kwargs custom_logit_processor custom_params input_ids rid extra_key cache_salt priority "
    "return_hidden_states return_routed_experts return_cached_tokens_details return_prompt_token_ids return_token_ids "
    "return_meta_info task routed_dp_rank data_parallel_rank ngram_corpus_id"
)

TENSORRT_LLM = _OPENAI | _names(
    "user prompt_token_ids thinking thinking_token_budget prompt_ignore_length best_of use_beam_search top_k min_p "
    "top_p_min repetition_penalty length_penalty early_stopping stop_token_ids include_stop_str_in_output ignore_eos "
    "min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens lora_request echo "
    "add_generation_prompt add_special_tokens documents chat_template chat_template_kwargs cache_salt priority "
    "mm_processor_kwargs"
)

TRANSFORMERS = TOKEN_LIMITS | _names(
    "model messages tools temperature top_p frequency_penalty logit_bias seed stop generation_config "
    "chat_template_kwargs"
)

LLAMA_CPP = _OPENAI | _names(
    "top_k min_p top_n_sigma typical_p typ_p xtc_probability xtc_threshold dynatemp_range dynatemp_exponent "
    "repeat_last_n repeat_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
    "mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay n_predict n_keep n_discard n_indent ignore_eos "
    "t_max_predict_ms n_probs min_keep post_sampling_probs samplers grammar grammar_lazy grammar_triggers json_schema "
    "cache_prompt return_tokens return_progress verbose timings_per_token id_slot lora chat_template_kwargs "
    "reasoning_format reasoning_in_content reasoning_control reasoning_budget_tokens thinking_budget_tokens "
    "add_generation_prompt continue_final_message preserved_tokens backend_sampling n_cache_reuse"
)

SGLANG_SAMPLING = _names(
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty min_new_tokens json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim custom_params logit_bias sampling_seed"
)
"""What `sampling_params` of SGLang's `/generate` may hold."""

SGLANG_TOP = _names(
    "lora_path session_id priority extra_key cache_salt routing_key require_reasoning max_thinking_tokens "
    "custom_logit_processor return_logprob logprob_start_len top_logprobs_num routed_dp_rank"
)
"""What stands beside them."""

SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""The names that `/generate` has for what OpenAI's protocol calls otherwise."""

VLLM_SAMPLING = _names(
    "max_tokens min_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos presence_penalty "
    "frequency_penalty repetition_penalty include_stop_str_in_output logit_bias allowed_token_ids bad_words logprobs "
    "prompt_logprobs logprob_token_ids structured_outputs extra_args thinking_token_budget repetition_detection"
)
"""What `sampling_params` of vLLM's `/inference/v1/generate` may hold."""

VLLM_TOP = frozenset({"cache_salt", "priority"})

RENDERED = frozenset({"chat_template_kwargs", "reasoning_effort"})
"""What goes into a prompt that is rendered here."""

NATIVE_SGLANG = SGLANG_SAMPLING | SGLANG_TOP | RENDERED | SGLANG_NAMES.keys()
NATIVE_VLLM = VLLM_SAMPLING | VLLM_TOP | RENDERED | {"max_completion_tokens"}


_RENAMED = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
    "repetition_penalty": "repeat_penalty",
    "repeat_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""What other servers, or earlier versions, call a parameter."""
_NEAR = 2
"""Near names that are told at most."""


class Allowance:
    """Tells what a server would not act on, once for each set of names."""

    def __init__(self, *, everything: bool) -> None:
        """Take whether everything may be sent, known or not."""
        self._everything = everything
        self._told: dict[tuple[str, frozenset[str]], str | None] = {}

    def refusal(self, names: Iterable[str], known: frozenset[str] | None, *, shown: str, strict: bool) -> str | None:
        """Return a sentence about the names that a server does not know, with near ones; None: all may be sent."""
        if self._everything or known is None:
            return None
        key = (shown, frozenset(names))
        if key not in self._told:
            self._told[key] = _refusal(key[1] - known, known, shown=shown, strict=strict)
        return self._told[key]


def _refusal(unknown: frozenset[str], known: frozenset[str], *, shown: str, strict: bool) -> str | None:
    if not unknown:
        return None
    hints = []
    for name in sorted(unknown):
        renamed = _RENAMED.get(name)
        near = [renamed] if renamed in known else difflib.get_close_matches(name, sorted(known), n=_NEAR)
        hints.append(f"{name} (did you mean {' or '.join(near)}?)" if near else name)
    them = "it" if len(hints) == 1 else "them"
    would = "refuse every request" if strict else f"pass over {them}"
    return (
        f"{shown} does not know {', '.join(hints)} and would {would}; enqueue again without {them} and with "
        f"--new-settings, or start the workers with MILL_ALLOW_UNKNOWN_PARAMETERS=true to send {them} all the same; "
        "then resume the dataset"
    )
