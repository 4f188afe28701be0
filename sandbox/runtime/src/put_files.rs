//! Files of the host that follow their user's into a container that runs.

use slipway_agent_protocol::v1::PutFilesRequest;

use crate::copies::{check_files, check_removed, pieces};
use crate::record::SandboxState;
use crate::target::Target;
use crate::{Result, v1};

/// Puts files into a container that runs, and then removes files.
///
/// # Errors
/// [`Error::Invalid`], which names the file; [`Error::WrongState`] if the container does not run;
/// [`Error::Refused`] if the guest refuses; [`Error::Agent`]. Files before the one that was refused
/// are in place.
pub(crate) async fn put(target: &Target, request: &v1::PutFilesRequest) -> Result<()> {
    target.has_process()?;
    if target.container.state() != SandboxState::Running {
        return Err(target.wrong_state("files of a container that runs can be changed"));
    }
    let (files, removed) = (check_files(&request.files)?, check_removed(&request.removed)?);
    let id = &target.container.name;
    let put = |files| PutFilesRequest { id: id.clone(), files, removed: Vec::new() };
    let mut requests: Vec<_> = pieces(files).into_iter().map(put).collect();
    if let Some(last) = requests.last_mut() {
        last.removed = removed;
    }
    let agent = target.sandbox.agent()?;
    for request in requests {
        agent.call(|mut client| async move { client.put_files(request).await }).await?;
    }
    Ok(())
}
