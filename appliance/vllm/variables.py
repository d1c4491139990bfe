"""Which variables of vLLM's environment may decide how weights lie in memory."""

from collections.abc import Mapping

# Set by who starts vLLM: the names that were there before it. It gives others values of its own, new ones each time.
NAMES_VARIABLE = "APPLIANCE_VARIABLES"

# These choose neither a kernel nor a layout. A new one that is not here is a fact, and refuses one attach too many
# rather than one too few.
NEUTRAL_VARIABLES = frozenset(
    {
        "VLLM_API_KEY", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE", "VLLM_CONFIGURE_LOGGING",
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


def shaping_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables whose values are facts about the weights."""
    if (names := environ.get(NAMES_VARIABLE)) is not None:
        return names.split()
    return sorted(name for name in environ if name.startswith("VLLM_") and name not in NEUTRAL_VARIABLES)
