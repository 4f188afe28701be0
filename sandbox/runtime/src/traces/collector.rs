//! The collector that gets the spans, by the settings or the environment.

use tonic::transport::Endpoint;

use super::DEADLINE;
use crate::config::Config;
use crate::{Error, Result};

/// The name of the service that spans are of, unless the environment has another one.
const SERVICE: &str = "slipway";

/// A collector, and the name of the service that it gets spans of.
#[derive(Clone, Debug)]
pub struct Collector {
    pub(super) endpoint: Endpoint,
    pub(super) service: String,
}

impl Collector {
    /// Finds the collector of the settings, or else of the environment, whose variables `variable`
    /// returns by their names (OpenTelemetry, *Environment variable specification*). Returns `None`
    /// if there is none.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the address in the settings cannot be used. One of the environment is
    /// left out then, with a line in the log: it may be meant for other programs.
    pub fn find(
        config: &Config,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>> {
        let filled = |name: &str| variable(name).filter(|value| !value.is_empty());
        let service = filled("OTEL_SERVICE_NAME").unwrap_or_else(|| SERVICE.to_owned());
        let set = &config.otlp_endpoint;
        if !set.is_empty() {
            let endpoint = endpoint(set)
                .map_err(|why| Error::Invalid(format!("otlp_endpoint = {set:?}: {why}")))?;
            return Ok(Some(Self { endpoint, service }));
        }
        let of_traces = |name: &str| {
            let own = filled(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"));
            own.or_else(|| filled(&format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        let Some(address) = of_traces("ENDPOINT") else { return Ok(None) };
        let usable = match of_traces("PROTOCOL").filter(|protocol| protocol != "grpc") {
            Some(protocol) => Err(format!("OTLP by {protocol} is not spoken, but grpc")),
            None => endpoint(&address),
        };
        let usable = usable.inspect_err(|why| {
            tracing::warn!(address, why, "no traces: the environment's collector is not used");
        });
        Ok(usable.ok().map(|endpoint| Self { endpoint, service }))
    }
}

/// Parses the address of a collector.
///
/// # Errors
/// The reason why it cannot be used.
fn endpoint(address: &str) -> Result<Endpoint, String> {
    let path = address.strip_prefix("unix://").or_else(|| address.strip_prefix("unix:"));
    let is_known = match path {
        Some(path) => path.starts_with('/'),
        None => address.starts_with("http://"),
    };
    if !is_known {
        return Err("a collector's address is http://HOST:PORT or unix:/PATH".to_owned());
    }
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|error| error.to_string())?;
    Ok(endpoint.connect_timeout(DEADLINE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the address and the service's name with these settings and this environment.
    fn find(set: &str, environment: &[(&str, &str)]) -> Result<Option<(String, String)>> {
        let config = Config { otlp_endpoint: set.to_owned(), ..Config::default() };
        let variable = |name: &str| {
            let found = environment.iter().find(|(one, _)| *one == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let found = Collector::find(&config, variable)?;
        Ok(found.map(|found| (found.endpoint.uri().to_string(), found.service)))
    }

    #[test]
    fn there_is_none_unless_it_is_named() {
        assert_eq!(find("", &[]).unwrap(), None);
        let others = [("OTEL_SERVICE_NAME", "node"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "")];
        assert_eq!(find("", &others).unwrap(), None);
    }

    #[test]
    fn the_settings_come_before_the_environment() {
        let named =
            |address: &str, service: &str| Some((format!("{address}/"), service.to_owned()));
        let general = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://b:2");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c:3");
        let name = ("OTEL_SERVICE_NAME", "node");
        assert_eq!(find("http://a:1", &[general]).unwrap(), named("http://a:1", "slipway"));
        assert_eq!(find("", &[general, name]).unwrap(), named("http://b:2", "node"));
        assert_eq!(find("", &[general, own]).unwrap(), named("http://c:3", "slipway"));
        let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        assert_eq!(find("", &[general, grpc]).unwrap(), named("http://b:2", "slipway"));
    }

    #[test]
    fn what_cannot_be_used_is_refused_in_the_settings_and_left_out_of_the_environment() {
        for bad in ["a:4317", "https://a:4317", "http://", "http://a b", "unix:a", "grpc://a"] {
            let error = find(bad, &[]).unwrap_err().to_string();
            assert!(error.contains("otlp_endpoint") && error.contains(bad), "{error}");
            let of_environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", bad)];
            assert_eq!(find("", &of_environment).unwrap(), None, "{bad}");
        }
        let http = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ];
        assert_eq!(find("", &http).unwrap(), None);
        assert!(endpoint("unix:/run/otlp.sock").is_ok() && endpoint("unix:///run/otlp").is_ok());
    }
}
