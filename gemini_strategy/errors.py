"""The exceptions of the package: one tree, so that `except GeminiError` catches everything of ours."""


class GeminiError(RuntimeError):
    """A call that Gemini cannot carry out in the present state; the text names the way out."""


class GeminiMemoryError(GeminiError, MemoryError):
    """A tier (DEVICE or HOST) has no room; the text has the bytes wanted and available."""


class GeminiDeviceError(GeminiError):
    """The CUDA driver or the operating system refused a call, or another rank did not do its part."""


class GuardError(GeminiError):
    """A managed parameter was used outside its unit in a way that cannot be served."""
