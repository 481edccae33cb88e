"""The marks of the chat format (ds41f §6), letter for letter."""

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TOOL_RESULT_OPEN = "<tool_result>"
TOOL_RESULT_CLOSE = "</tool_result>"
IMAGE = "<｜deepseek_image｜>"

CALLS_OPEN = "<｜DSML｜ calls>"
CALLS_CLOSE = "</｜DSML｜ calls>"
INVOKE_OPEN = '<｜DSML｜ invoke name="'
INVOKE_CLOSE = "</｜DSML｜ invoke>"
PARAMETER_OPEN = '<｜DSML｜ parameter name="'
PARAMETER_CLOSE = "</｜DSML｜ parameter>"

# Between the text of an answer and its calls, and between the parts of a user turn.
GAP = "\n\n"
