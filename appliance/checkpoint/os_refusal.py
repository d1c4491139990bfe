"""Turn an `OSError` into the error of whoever must act: operator, nobody yet (full), or the host."""

import errno

from appliance.errors import ApplianceError, ConfigError, HostError, ResourceError

_OPERATOR = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


def os_refusal(error: OSError, doing: str) -> ApplianceError:
    """Return `cannot DOING: reason` as ConfigError (path, permission), ResourceError (full) or HostError (the rest)."""
    message = f"cannot {doing}: {error.strerror or error}"
    if error.errno in _OPERATOR:
        return ConfigError(message)
    if error.errno in _FULL:
        return ResourceError(message)
    return HostError(message)
