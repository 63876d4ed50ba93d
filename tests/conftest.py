"""What must stand before anything is imported."""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

# Triton decides at import whether its kernels run in the interpreter, and transformers imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Everyone runs the same examples, so a failure is the change's own. HYPOTHESIS_PROFILE=random looks for new ones.
# None is called slow or flaky because the machine was busy: what never ends, pytest's own limit of time ends.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
profile = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
settings.load_profile(profile)
if profile == "random":  # making a failure small takes longer than a test may; cut short it would be called flaky
    os.environ.setdefault("PYTEST_TIMEOUT", "0")


def pytest_collection_finish() -> None:
    """What imports have made stays: with torch and transformers, a million objects that no collection frees."""
    gc.collect()
    gc.freeze()
