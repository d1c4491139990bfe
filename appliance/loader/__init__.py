"""The loader: fills a keeper's empty slots from disk and exits. The keeper runs it as a child."""
