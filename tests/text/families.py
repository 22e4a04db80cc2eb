"""How families of models write reasoning and tool calls: small chat templates in their published
forms, written here.

What a template makes of an assistant's message is what its model was trained to write. So the tests
parse what transformers renders with these templates, and compare it with the message.
"""

from dataclasses import dataclass

HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' }}
{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}{{ 'type ' + tool.function.name + ' = (_: any) => any;\\n' }}{% endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.content and message.thinking and message.tool_calls %}
            {{- raise_exception('content and thinking in one message with calls') }}
        {%- endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.content %}
            {{- '<|start|>assistant<|channel|>' + ('commentary' if message.tool_calls else 'final') + '<|message|>' }}
            {{- message.content + '<|end|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}
            {{- call.function.arguments | tojson }}
            {{- '<|call|>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

QWEN3_CODER = """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n<function><name>' + tool.function.name + '</name></function>' }}{% endfor %}
    {{- '</tools>\\nCall with <tool_call><function=...></function></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- if value is mapping or (value is sequence and value is not string) %}{{ value | tojson }}
                {%- else %}{{ value | string }}{% endif %}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

GLM_45 = """[gMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}<|assistant|>
        {{- '\\n<think>' + (message.reasoning_content or '') + '</think>' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
        {{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}
"""

GLM_47 = """[gMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}<|assistant|>
        {{- '<think>' + (message.reasoning_content or '') + '</think>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<arg_key>' + name + '</arg_key><arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|><tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('</think>' if enable_thinking is defined and not enable_thinking else '<think>') }}
{%- endif %}
"""

MISTRAL_SMALL_32 = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.id is not string or call.id | length != 9 %}
                {{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
            {{- '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message['content'] + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

MINISTRAL_3 = """{{ bos_token }}
{{- '[SYSTEM_PROMPT]Think first: [THINK]thoughts[/THINK]answer[/SYSTEM_PROMPT]' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if not message['content'] and not message['tool_calls'] %}
            {{- raise_exception('an assistant must say something') }}
        {%- endif %}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{ block['text'] }}
                {%- else %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% endif %}
            {%- endfor %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

GEMMA_4 = """
{%- macro written(value) %}
    {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean %}{{ 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for name, inner in value | dictsort %}
            {{- name + ':' + written(inner) + ('' if loop.last else ',') }}
        {%- endfor %}
        {{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}
        {%- for inner in value %}{{ written(inner) + ('' if loop.last else ',') }}{% endfor %}
        {{- ']' }}
    {%- else %}{{ value }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools or enable_thinking %}
    {{- '<|turn>system\\n' + ('<|think|>' if enable_thinking else '') }}
    {%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name + '<tool|>' }}{% endfor %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name + '{' }}
        {%- for name, value in call.function.arguments | dictsort %}
            {{- name + ':' + written(value) + ('' if loop.last else ',') }}
        {%- endfor %}
        {{- '}<tool_call|>' }}
    {%- endfor %}
    {{- message.content | trim + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') }}
{%- endif %}
"""

GRANITE_4 = """
{%- if tools %}
    {{- '<|start_of_role|>system<|end_of_role|><tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>Answer with <tool_call></tool_call>.<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""

GRANITE_33 = """
{%- if tools %}{{ 'Answer with <|tool_call|> and a JSON list. ' + tools | tojson }}
{%- elif thinking %}{{ 'Think between <think></think>, answer between <response></response>. ' }}{% endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""


@dataclass(frozen=True)
class Family:
    """A family's template, and the tokens that its tokenizer has for the markers in it."""

    template: str
    control: tuple[str, ...]
    plain: tuple[str, ...] = ()
    reasons: bool = True  # whether the template writes an assistant's reasoning


_THINK = ("<think>", "</think>")
_GLM = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    *_THINK,
)
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")

FAMILIES = {
    "harmony": Family(
        HARMONY,
        (
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
    ),
    "qwen3-coder": Family(
        QWEN3_CODER, ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>"), reasons=False
    ),
    "glm-4.5": Family(GLM_45, ("<|user|>", "<|assistant|>", "<|observation|>"), _GLM),
    "glm-4.7": Family(GLM_47, ("<|user|>", "<|assistant|>", "<|observation|>"), _GLM),
    "mistral-small-3.2": Family(MISTRAL_SMALL_32, ("[CALL_ID]", *_MISTRAL), reasons=False),
    "ministral-3": Family(MINISTRAL_3, ("[THINK]", "[/THINK]", *_MISTRAL)),
    "gemma-4": Family(
        GEMMA_4,
        (
            "<|turn>",
            "<turn|>",
            "<|channel>",
            "<channel|>",
            "<|tool_call>",
            "<tool_call|>",
            '<|"|>',
            "<|think|>",
        ),
    ),
    "granite-4": Family(
        GRANITE_4,
        ("<|start_of_role|>", "<|end_of_role|>"),
        ("<tool_call>", "</tool_call>"),
        reasons=False,
    ),
}
