"""SGLang's servers, prefill and decode joined by a bootstrap room. Reached by entry points alone."""

from __future__ import annotations
