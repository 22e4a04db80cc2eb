"""Chat templates in the styles that model families use, written for these tests. What they share
with published ones are the constructs: whitespace control, namespaces, slices, filters, tests,
string methods, macros and refusals."""

CHATML = """
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nBe of help.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>' ~ '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""

LLAMA_2 = """
{%- set turns = messages -%}
{%- set preamble = false -%}
{%- if messages[0]['role'] == 'system' %}
    {%- set turns = messages[1:] -%}
    {%- set preamble = messages[0]['content'] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') -}}
    {%- endif -%}
    {%- set text = turn['content'] -%}
    {%- if loop.index0 == 0 and preamble != false -%}
        {%- set text = '<<SYS>>\\n' + preamble + '\\n<</SYS>>\\n\\n' + text -%}
    {%- endif -%}
    {%- if turn['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' -}}
    {%- elif turn['role'] == 'assistant' -%}
        {{- ' ' + text.strip() + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

LLAMA_3 = """
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{% set date_string = "1 Jan 2026" %}{% endif %}
{%- endif %}
{%- if not tools is defined or tools is none %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set opening = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set opening = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: ipython\\n" }}{% endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- opening + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set first = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set askers = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in rest if message.role in ["user", "assistant"] and not message.tool_calls %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("user and assistant must take turns") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == askers[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {%- if value is string %}{{ '"' + key + '": "' + value + '"' }}
                    {%- else %}{{ '"' + key + '": ' + value|tojson }}{% endif %}
                    {%- if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{ ", " }}{% else %}{{ "]" }}{% endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and first is defined %}
            {{- "[INST] " + first + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] " + (message.tool_calls | map(attribute="function") | list | tojson) + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS] " + {"content": message.content|string} | tojson + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("unknown role " ~ message.role) }}
    {%- endif %}
{%- endfor %}
"""

QWEN = """
{%- macro as_text(content) %}
    {%- if content is string %}{{ content }}
    {%- elif content is none or content is undefined %}{{ '' }}
    {%- else %}{{ raise_exception('unexpected content') }}{% endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ as_text(messages[0].content) + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + as_text(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set text = message.content %}
    {%- set is_result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if ns.searching and message.role == "user" and not (is_result) %}
        {%- set ns.searching = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = as_text(message.content) %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

GLM = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools{% for tool in tools %}{% set function = tool.function if tool.function is defined else tool %}

## {{ function.name }}

{{ function | tojson(indent=2) }}
{% endfor %}
{%- endif -%}
{%- for item in messages -%}
    {%- if item.role == 'tool' -%}<|observation|>
{{ item.content }}
    {%- elif item.role == 'assistant' -%}<|assistant|>
{{ item.content.split('</think>')[-1] | trim }}
    {%- else -%}<|{{ item['role'] }}|>
{{ item['content'] }}
    {%- endif -%}
{%- endfor -%}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{%- for message in messages -%}
{%- if loop.previtem is defined and loop.previtem.role == message.role -%}
    {{ raise_exception('speak in turns') }}
{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

EVERYTHING_ELSE = """{# a comment #}
{%- set words = [] %}
{%- for message in messages recursive %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if loop.index > 6 %}{% break %}{% endif %}
    {{- loop.index }}/{{ loop.length }}{{ ' odd' if loop.index is odd }} {{ loop.cycle('a', 'b') }} {{ loop.revindex0 }}
    {{- message.role | upper }} {{ message.role | capitalize }} {{ message.role.title() }}
    {{- message.content | length }} {{ message.content | replace('o', '0') }}
    {{ message.content[:3] }} {{ message.content[-3:] }} {{ message.content[::2] }}
{% else %}
nobody
{% endfor %}
{% set block %}
  a block
  {% endset %}[{{ block }}]
{%- with half = 7 // 2 %}{{ half }} {{ 7 % 4 }} {{ 7 / 2 }} {{ 2 ** 5 }} {{ -3 | abs }} {{ 3.0 }}{% endwith %}
{{ none }} {{ true }} {{ [1, 'two', none, false] }} {{ {'a': 1, 'b': [2]} }} {{ 'x' ~ 1 ~ none ~ true }}
{{ messages | map(attribute='role') | join(', ') }} {{ messages | rejectattr('role', 'eq', 'user') | list | length }}
{{ ['b', 'a'] | sort | first }} {{ ['b', 'a'] | last }} {{ [3, 1] | max }} {{ (1, 2) | list }} {{ range(3) | list }}
{{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1}.items() | list }} {{ {'b': 1}.get('c', 'none') }}
{{ {'k': 1}.keys() | list }} {{ 'a,b,c'.split(',', 1) }} {{ 'xaxa'.lstrip('x').rstrip('a') }} {{ 'abc'.find('c') }}
{{ 'abc'.upper() }} {{ 'B'.lower() }}
{{ missing is defined }} {{ missing | default('fallback') }} {{ '' | default('empty', true) }} {{ '12' | int + 1 }}
{{ 'a' in 'abc' and 'z' not in ['a'] }} {{ 3 is number }} {{ 'a' is string }} {{ none is none }} {{ [] is iterable }}
{{ {} is mapping }} {{ [] is sequence }} {{ 1 == 1.0 }} {{ not [] }} {{ 'yes' if messages else 'no' }} {{ 1 < 2 <= 2 }}
{% raw %}{{ raw }}{% endraw %} {{ '<b> & "q"' }} {{ '<b>' | tojson }} {{ 'é' | tojson }}
{{ {'z': 1, 'a': [1.5, true]} | tojson(indent=2) }}
{% macro wrap(text, left='<', right='>') %}{{ left }}{{ text }}{{ right }}{% endmacro %}{{ wrap('x', right='|') }}
{% filter upper %}shout{% endfilter %} {{ '%s-%s' | format('a', 3) }} {{ ['a', 'b'][0] }} {{ messages[-1]['role'] }}
"""

STYLES = {
    "chatml": CHATML,
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "glm": GLM,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
    "everything-else": EVERYTHING_ELSE,
}
