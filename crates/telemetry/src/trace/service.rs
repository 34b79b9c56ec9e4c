//! The process that spans come from, as OpenTelemetry's resource describes it.
//!
//! Owns: the names of services. Never: changes while the process runs. Invariant: the operator's
//! `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` replace what is named here.
//!
//! Attributes: <https://opentelemetry.io/docs/specs/semconv/resource/service/>.

use cleave_domain::Role;
use opentelemetry::KeyValue;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};

const SERVICE_NAME_VARIABLE: &str = "OTEL_SERVICE_NAME";

/// A process of a fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceProcess {
    kind: ServiceKind,
    instance: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServiceKind {
    Fleet,
    Router,
    Worker(Role),
}

impl ServiceProcess {
    /// A router and its workers in one process; `port` is where clients reach it.
    pub fn fleet(port: u16) -> Self {
        Self::on_host(ServiceKind::Fleet, port)
    }

    /// A router alone; `port` is where clients reach it.
    pub fn router(port: u16) -> Self {
        Self::on_host(ServiceKind::Router, port)
    }

    /// A worker alone, with the role that it starts with.
    pub fn worker(name: &str, role: Role) -> Self {
        Self {
            kind: ServiceKind::Worker(role),
            instance: name.to_owned(),
        }
    }

    /// Processes of one host differ by their ports.
    fn on_host(kind: ServiceKind, port: u16) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self {
            kind,
            instance: format!("{}:{port}", host.trim()),
        }
    }

    /// The resource of its spans, as the environment changes it.
    pub(super) fn resource(&self) -> Resource {
        let resource = Resource::builder_empty()
            .with_attributes(self.attributes())
            .with_detectors(&[
                Box::new(TelemetryResourceDetector),
                Box::new(EnvResourceDetector::new()),
            ]);
        let name = std::env::var(SERVICE_NAME_VARIABLE).ok();
        // By OpenTelemetry's specification an empty variable is the same as none.
        match name.filter(|name| !name.is_empty()) {
            Some(name) => resource.with_service_name(name),
            None => resource,
        }
        .build()
    }

    fn attributes(&self) -> [KeyValue; 4] {
        let (name, role) = match self.kind {
            ServiceKind::Fleet => ("cleave", "fleet"),
            ServiceKind::Router => ("cleave-router", "router"),
            ServiceKind::Worker(Role::Prefill) => ("cleave-prefill", "prefill"),
            ServiceKind::Worker(Role::Decode) => ("cleave-decode", "decode"),
            ServiceKind::Worker(Role::Both) => ("cleave-mixed", "both"),
        };
        [
            KeyValue::new("service.name", name),
            KeyValue::new("service.instance.id", self.instance.clone()),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("cleave.role", role),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The attributes of a process by their names.
    #[track_caller]
    fn value(process: &ServiceProcess, key: &str) -> String {
        let attributes = process.attributes();
        let mut found = attributes.iter().filter(|one| one.key.as_str() == key);
        let one = found.next().expect("it has the attribute");
        assert!(found.next().is_none(), "{key} is there once");
        one.value.to_string()
    }

    #[test]
    fn each_role_is_a_service_of_its_own() {
        let worker = |role| ServiceProcess::worker("w-1", role);
        for (process, name, role) in [
            (ServiceProcess::fleet(8000), "cleave", "fleet"),
            (ServiceProcess::router(8000), "cleave-router", "router"),
            (worker(Role::Prefill), "cleave-prefill", "prefill"),
            (worker(Role::Decode), "cleave-decode", "decode"),
            (worker(Role::Both), "cleave-mixed", "both"),
        ] {
            assert_eq!(value(&process, "service.name"), name);
            assert_eq!(value(&process, "cleave.role"), role);
            let version = env!("CARGO_PKG_VERSION");
            assert_eq!(value(&process, "service.version"), version);
        }
    }

    #[test]
    fn an_instance_is_a_workers_name_or_a_port() {
        let instance = |process: &ServiceProcess| value(process, "service.instance.id");
        let worker = ServiceProcess::worker("w-1", Role::Decode);
        assert_eq!(instance(&worker), "w-1");
        for process in [ServiceProcess::fleet(8001), ServiceProcess::router(8001)] {
            let instance = instance(&process);
            assert!(instance.ends_with(":8001"), "{instance}");
        }
    }
}
