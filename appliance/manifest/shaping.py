"""Which of vLLM's arguments and variables may decide how weights lie in memory; those are facts about a shard.

Both lists name what decides nothing. What is new and on neither is a fact: it costs one load too many, never the other
way around.
"""

from collections.abc import Mapping, Sequence

from appliance.manifest.arguments import option_name

# Set by who starts vLLM: the names that were there before it. It gives others values of its own, new ones each time.
NAMES_VARIABLE = "APPLIANCE_VARIABLES"

NEUTRAL_VARIABLES = frozenset(
    {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT",
        "VLLM_ASSETS_CACHE", "VLLM_CONFIGURE_LOGGING",
        "VLLM_CPU_CI_ENV", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_DIST_IDENT", "VLLM_DO_NOT_TRACK", "VLLM_DP_MASTER_IP",
        "VLLM_DP_MASTER_PORT", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE",
        "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_HOST_IP", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_PREFIX",
        "VLLM_LOGGING_STREAM", "VLLM_LOG_MODEL_INSPECTION", "VLLM_LOG_STATS_INTERVAL", "VLLM_NO_USAGE_STATS",
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
        "VLLM_PLUGINS", "VLLM_PORT", "VLLM_RPC_BASE_PATH", "VLLM_RPC_TIMEOUT", "VLLM_SERVER_DEV_MODE",
        "VLLM_TRACE_FUNCTION", "VLLM_USAGE_SOURCE", "VLLM_USAGE_STATS_SERVER", "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_XLA_CACHE_PATH",
    }
)  # fmt: skip

NEUTRAL_ARGUMENTS = frozenset(
    {
        "--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins", "--api-key",
        "--api-server-count", "--async-scheduling", "--chat-template", "--chat-template-content-format",
        "--default-chat-template-kwargs", "--disable-access-log-for-endpoints", "--disable-fastapi-docs",
        "--disable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log", "--enable-auto-tool-choice",
        "--enable-chunked-prefill", "--enable-force-include-usage", "--enable-log-requests",
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-request-id-headers",
        "--enable-server-load-tracking", "--exclude-tools-when-tool-choice-none", "--generation-config",
        "--gpu-memory-utilization", "--h11-max-header-count", "--h11-max-incomplete-event-size",
        "--kv-cache-memory-bytes", "--log-config-file", "--log-error-stack", "--long-prefill-token-threshold",
        "--lora-modules",
        "--max-log-len", "--max-logprobs", "--max-long-partial-prefills", "--max-num-batched-tokens",
        "--max-num-partial-prefills", "--max-num-seqs", "--middleware", "--no-async-scheduling",
        "--no-enable-chunked-prefill", "--no-enable-log-requests", "--no-enable-prefix-caching",
        "--num-gpu-blocks-override", "--otlp-traces-endpoint", "--override-generation-config",
        "--prefix-caching-hash-algo", "--reasoning-parser", "--response-role", "--root-path", "--scheduling-policy",
        "--seed", "--shutdown-timeout", "--swap-space", "--tool-call-parser", "--tool-parser-plugin",
        "--tool-server", "--trust-request-chat-template", "--uvicorn-log-level",
    }
)  # fmt: skip


def shaping_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are facts about the weights, with their values, in their order."""
    kept: list[str] = []
    neutral = False
    for word in arguments:
        if word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit()):
            neutral = option_name(word) in NEUTRAL_ARGUMENTS
        if not neutral:
            kept.append(word)
    return kept


def shaping_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables whose values are facts about the weights."""
    if (names := environ.get(NAMES_VARIABLE)) is not None:
        return names.split()
    return sorted(name for name in environ if name.startswith("VLLM_") and name not in NEUTRAL_VARIABLES)
