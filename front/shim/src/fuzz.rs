//! The body of the fuzz target.

use prost::Message;

use crate::role::{self, Role};
use crate::spec::{self, Container, Oci};
use crate::ttrpc::{frame, v1};
use crate::{args, containerd as cd, options};

/// The largest answer to a request that is refused, bytes: one line.
const LONGEST: usize = 128 << 10;

/// Takes `data` for a connection of containerd's: frames, the requests in them, and the JSON in
/// those.
pub fn requests(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let mut from = data;
    while let Ok(Some((header, message))) = runtime.block_on(frame::read(&mut from)) {
        assert_eq!(frame::Header::parse(header.bytes()), header);
        assert_eq!(message.len(), header.length as usize);
        if let Ok(request) = v1::Request::decode(message.as_slice()) {
            payload(&request.payload);
        }
        payload(&message);
    }
}

fn payload(bytes: &[u8]) {
    // Protobuf names no types: the same bytes are tried as each kind of request.
    if let Ok(request) = cd::CreateTaskRequest::decode(bytes)
        && let Err(reason) = options::check(&request)
    {
        assert!(!reason.contains('\n') && reason.len() < LONGEST);
    }
    let _ = cd::KillRequest::decode(bytes);
    if let Ok(request) = cd::CreateSandboxRequest::decode(bytes) {
        sandbox(&request);
    }
    if let Ok(request) = cd::ExecProcessRequest::decode(bytes)
        && let Some(any) = request.spec
    {
        json(&any.value);
    }
    json(bytes);
}

fn sandbox(request: &cd::CreateSandboxRequest) {
    let Ok(asked) = spec::pod_of_sandbox(request, "dev.slipway.*") else { return };
    if let Ok(pod) = spec::pod_spec(&asked.oci, &Default::default(), "") {
        assert!(pod.makes_pod && pod.entrypoint.is_none());
    }
}

fn json(bytes: &[u8]) {
    if let Ok(oci) = serde_json::from_slice::<Oci>(bytes) {
        let (read_only, functions) = (oci.root.readonly, "/run/slipway/functions");
        let container = Container { id: "one", in_pod: false, read_only, functions };
        let member = Container { in_pod: true, ..container };
        let alone = spec::run_spec(&oci, container);
        let pod = spec::PodNamespaces { network: "/run/netns/one", processes: [1, 2] };
        for made in [alone, spec::member_spec(&oci, member, pod)] {
            match made {
                Ok(run) => assert!(run.entrypoint.is_some_and(|program| !program.is_empty())),
                Err(reason) => assert!(reason.len() < LONGEST + bytes.len()),
            }
        }
        match spec::pod_spec(&oci, &Default::default(), "") {
            Ok(pod) => assert!(pod.makes_pod && pod.entrypoint.is_none()),
            Err(reason) => assert!(reason.len() < LONGEST + bytes.len()),
        }
        // A name that is taken for an id is one component of a path.
        if let Ok(group) = role::group("one", &oci.annotations) {
            assert!(args::is_id(&group));
        }
        let _ = Role::of(&oci.annotations);
    }
    let _ = spec::exec_spec(bytes);
    for update in [spec::update(bytes), spec::pod_update(bytes)].into_iter().flatten() {
        assert_ne!(update, spec::Update::default());
    }
}
