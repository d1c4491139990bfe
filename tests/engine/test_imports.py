"""The heavy imports happen once, and only they are kept from the garbage collector."""

import gc
import weakref

from appliance.engine.imports import import_heavy_modules


class Model:
    """Refers to itself, as one that has generated does."""

    def __init__(self) -> None:
        self.self = self


def test_a_model_that_was_there_when_they_were_asked_for_again_is_let_go() -> None:
    import_heavy_modules()
    model = Model()
    gone = weakref.ref(model)
    import_heavy_modules()
    del model
    gc.collect()
    assert gone() is None
