//! The container whose processes another one of its pod shares, as a debugging container does
//! (`kubectl debug --target`).
//!
//! containerd names a PID namespace by a process of its target, and the process of all tasks of a
//! pod is the VMM's. So the shim asks containerd: its CRI plugin keeps a container's configuration,
//! which names the target, in an extension of containerd's record of the container.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tonic::metadata::AsciiMetadataValue;
use tonic::{Code, Request, Status};

use crate::args::{self, Args};
use crate::containers::GetContainerRequest;
use crate::containers::containers_client::ContainersClient;
use crate::ttrpc::Failure;

/// The annotation that names the target, for clients of containerd's that are not its CRI plugin.
const TARGET: &str = "dev.slipway.processes-of";
/// The annotation that every container of the CRI plugin has.
const OF_PLUGIN: &str = "io.kubernetes.cri.container-name";
/// The names of the extension with a container's configuration, of present and later versions.
const EXTENSIONS: [&str; 2] =
    ["io.cri-containerd.container.metadata", "io.containerd.cri.container.metadata"];
/// The JSON pointer to the namespace options of the container's configuration in that extension.
const OPTIONS: &str = "/Metadata/Config/linux/security_context/namespace_options";
/// The mode of a PID namespace that is another container's (`NamespaceMode` of the CRI).
const MODE: i64 = 3;
/// The header with containerd's namespace.
const NAMESPACE: &str = "containerd-namespace";
/// The size of the largest record, bytes; containerd's own limit of a message.
const LARGEST: usize = 16 << 20;
/// The longest time that containerd may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Finds the container whose processes the container `id` shares. Returns `None` if it shares those
/// of its pod. The caller has checked that the container's PID namespace is one of its pod's.
///
/// # Errors
/// [`Code::InvalidArgument`] if the name is no container's id; another code if containerd does not
/// answer, or its record is not understood.
pub async fn of(
    args: &Args,
    id: &str,
    annotations: &BTreeMap<String, String>,
) -> Result<Option<String>, Failure> {
    let target = match annotations.get(TARGET) {
        Some(target) => Some(target.clone()),
        None if annotations.contains_key(OF_PLUGIN) => {
            let asked = tokio::time::timeout(PATIENCE, ask(args, id)).await;
            asked.unwrap_or_else(|_| Err(failed(args, Code::DeadlineExceeded, "no answer")))?
        }
        None => None,
    };
    match target {
        Some(target) if !args::is_id(&target) => {
            let message = format!("{target:?}, whose processes {id} is to share, is no id");
            Err(Failure::new(Code::InvalidArgument, message))
        }
        target => Ok(target),
    }
}

/// Asks containerd for the target of one of its CRI plugin's containers.
async fn ask(args: &Args, id: &str) -> Result<Option<String>, Failure> {
    let socket = args.address.strip_prefix("unix://").unwrap_or(&args.address);
    let channel = slipway_sandbox_api::connect(Path::new(socket)).await;
    let channel = channel.map_err(|error| failed(args, Code::Unavailable, &error.to_string()))?;
    let refused = |status: Status| failed(args, status.code(), status.message());
    let mut request = Request::new(GetContainerRequest { id: id.to_owned() });
    let namespace = AsciiMetadataValue::try_from(args.namespace.as_str());
    let namespace =
        namespace.map_err(|_| failed(args, Code::InvalidArgument, "the namespace is no word"))?;
    request.metadata_mut().insert(NAMESPACE, namespace);
    let mut client = ContainersClient::new(channel).max_decoding_message_size(LARGEST);
    let reply = client.get(request).await.map_err(refused)?.into_inner();
    let extensions = reply.container.unwrap_or_default().extensions;
    match EXTENSIONS.iter().find_map(|name| extensions.get(*name)) {
        Some(extension) => {
            named_in(&extension.value).map_err(|why| failed(args, Code::Unknown, &why))
        }
        None => Ok(None),
    }
}

/// Returns the target that a container's configuration names, if it names one.
fn named_in(extension: &[u8]) -> Result<Option<String>, String> {
    let extension: Value = serde_json::from_slice(extension)
        .map_err(|error| format!("the container's metadata: {error}"))?;
    let Some(options) = extension.pointer(OPTIONS) else { return Ok(None) };
    if options.get("pid").and_then(Value::as_i64) != Some(MODE) {
        return Ok(None);
    }
    let target = options.get("target_id").and_then(Value::as_str);
    target
        .map(|target| Some(target.to_owned()))
        .ok_or_else(|| "the container's metadata names no target of its PID namespace".to_owned())
}

fn failed(args: &Args, code: Code, why: &str) -> Failure {
    let message = format!(
        "containerd at {:?} does not say whose processes the container shares: {why}; create the \
         container again",
        args.address
    );
    Failure::new(code, message)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use serde_json::json;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Response, transport::Server};

    use super::*;
    use crate::containers::containers_server::{Containers, ContainersServer};
    use crate::containers::{Container, Extension, GetContainerResponse};

    /// The metadata of a container as the CRI plugin writes it.
    fn metadata(options: Value) -> Vec<u8> {
        let context = json!({"namespace_options": options});
        let config = json!({"metadata": {"name": "a"}, "linux": {"security_context": context}});
        let metadata = json!({"ID": "a", "SandboxID": "pod", "Config": config});
        json!({"Version": "v1", "Metadata": metadata}).to_string().into_bytes()
    }

    #[test]
    fn a_configuration_names_a_target_in_one_mode_only() {
        let named = |options| named_in(&metadata(options));
        assert_eq!(named(json!({"pid": 3, "target_id": "web"})), Ok(Some("web".to_owned())));
        assert_eq!(named(json!({"target_id": "web"})), Ok(None));
        assert_eq!(named(json!({"pid": 1})), Ok(None));
        assert_eq!(named(Value::Null), Ok(None));
        assert_eq!(named_in(br#"{"Version": "v1", "Metadata": {"Config": null}}"#), Ok(None));
        assert!(named(json!({"pid": 3})).unwrap_err().contains("no target"));
        assert!(named_in(b"{").unwrap_err().contains("metadata"));
    }

    /// containerd with one container, whose id is "a".
    struct Fake(&'static str);

    #[tonic::async_trait]
    impl Containers for Fake {
        async fn get(
            &self,
            request: Request<GetContainerRequest>,
        ) -> Result<Response<GetContainerResponse>, Status> {
            let namespace = request.metadata().get(NAMESPACE).and_then(|one| one.to_str().ok());
            assert_eq!(namespace, Some("k8s.io"));
            let id = request.into_inner().id;
            if id != "a" {
                return Err(Status::not_found(format!("container {id:?}: not found")));
            }
            let value = metadata(json!({"pid": 3, "target_id": "web"}));
            let extension = Extension { type_url: String::new(), value };
            let extensions = HashMap::from([(self.0.to_owned(), extension)]);
            let container = Some(Container { id, extensions });
            Ok(Response::new(GetContainerResponse { container }))
        }
    }

    fn serve(dir: &Path, extension: &'static str) -> Args {
        let socket = dir.join(extension);
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let server = Server::builder().add_service(ContainersServer::new(Fake(extension)));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        let address = socket.to_string_lossy().into_owned();
        Args { namespace: "k8s.io".to_owned(), address, ..Args::default() }
    }

    fn annotations(key: &str, value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(key.to_owned(), value.to_owned())])
    }

    #[tokio::test]
    async fn containerd_is_asked_for_its_plugins_containers() {
        let (dir, plugins) = (tempfile::tempdir().unwrap(), annotations(OF_PLUGIN, "debug"));
        for extension in EXTENSIONS {
            let args = serve(dir.path(), extension);
            let target = of(&args, "a", &plugins).await.unwrap();
            assert_eq!(target.as_deref(), Some("web"), "{extension}");
            let missing = of(&args, "b", &plugins).await.unwrap_err();
            assert_eq!(missing.code, Code::NotFound);
        }
        let other = serve(dir.path(), "other");
        assert_eq!(of(&other, "a", &plugins).await, Ok(None));
        assert_eq!(of(&other, "a", &BTreeMap::new()).await, Ok(None));
        let gone = Args { address: "/no/such/socket".to_owned(), ..other };
        assert_eq!(of(&gone, "a", &plugins).await.unwrap_err().code, Code::Unavailable);
    }

    #[tokio::test]
    async fn an_annotation_names_the_target_and_containerd_is_not_asked() {
        let target = of(&Args::default(), "a", &annotations(TARGET, "web")).await;
        assert_eq!(target, Ok(Some("web".to_owned())));
        let refused = of(&Args::default(), "a", &annotations(TARGET, "../web")).await.unwrap_err();
        assert_eq!(refused.code, Code::InvalidArgument);
        assert!(refused.message.contains("is no id"), "{refused}");
    }
}
