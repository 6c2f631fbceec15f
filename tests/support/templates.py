"""Chat templates that treat thoughts as those of real model families do."""

from __future__ import annotations

QWEN3 = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Keeps the last turn's thoughts, from the field or inline, and drops those of earlier turns."""

QWEN25 = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Does not know reasoning, and writes argument texts as quoted ones."""

DEEPSEEK = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|Assistant|>' + content + '<|end_of_sentence|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""
"""Removes the thoughts of every finished turn."""

KIMI = """\
{%- for message in messages %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- if message.role == 'assistant' %}{{- '<think></think>' }}{%- endif %}
{{- message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
"""Blanks the thoughts of finished turns, as Kimi K2 Thinking does."""

KIMI_OPENED = (
    KIMI.removesuffix("{%- endif %}").removesuffix("<|im_middle|>' }}") + "<|im_middle|><think>' }}{%- endif %}"
)
"""The same, but the answer begins inside a thought that the prompt opens, as with Kimi K2.5."""

OPENED = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
"""Keeps the thoughts, and the prompt opens them, as with Qwen3.5."""

STRICT = """\
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{{- message.role + ': ' + message.content + '\\n' }}
{%- endfor %}"""
"""Refuses system turns."""

MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.reasoning_content + message.content }}{%- endgeneration %}
{%- else %}{{- message.content }}{%- endif %}
{%- endfor %}"""
"""Marks what the assistant wrote."""
