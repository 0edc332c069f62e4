"""The version of radixlm, for servers, artifacts and builds."""

VERSION = "0.1.0"
