"""Where objects are."""

from unbroken_operator.adapters.kube import collection_path
from unbroken_operator.adapters.lease import API_VERSION as LEASES_VERSION
from unbroken_operator.adapters.lease import LeaseName
from unbroken_operator.api import layout

NAMESPACE = "ml"
JOB = "digits"
RACK = "example.com/rack"
LEASE = LeaseName("unbroken-system", "unbroken-operator")
LEASE_S = 15

PODS = collection_path("pods", NAMESPACE)
SERVICES = collection_path("services", NAMESPACE)
SECRETS = collection_path("secrets", NAMESPACE)
EVENTS = collection_path("events", NAMESPACE)
NODES = collection_path("nodes")
JOBS = collection_path(layout.PLURAL, NAMESPACE, layout.API_VERSION)
LEASES = collection_path("leases", LEASE.namespace, LEASES_VERSION)
JOB_PATH = f"{JOBS}/{JOB}"
