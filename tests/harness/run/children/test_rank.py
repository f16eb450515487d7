"""What a worker process is started with."""

from __future__ import annotations

from harness.run.children.rank import library_caches


def test_libraries_keep_what_they_compile_in_the_folder_of_the_run() -> None:
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE"
    found = library_caches({"LANG": "C"}, "/private")
    assert found == {f"{name}_ENABLED": "1", f"{name}_DIR": "/private/flash-attn-4"}
    assert library_caches({f"{name}_ENABLED": "0"}, "/private") == {}, "the user's choice stays"
