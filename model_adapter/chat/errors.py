"""What a caller of the chat format can get wrong."""


class ChatError(ValueError):
    """A message, role, tool or option that the chat format has no place for.

    The message names the offending entry (`messages[3].role`) and its value.
    """
