//! containerd's calls of a shim under test.

use super::*;

/// A shim under test.
pub(super) trait Calls {
    /// Returns its service.
    fn service(&self) -> &Arc<Service>;

    /// Calls a method.
    async fn call<R: Message + Default>(
        &self,
        method: &str,
        message: &impl Message,
    ) -> Result<R, Failure> {
        let (handler, payload) = (Arc::clone(self.service()), message.encode_to_vec());
        let answer = handler.call(SERVICE.to_owned(), method.to_owned(), payload).await?;
        Ok(R::decode(answer.as_slice()).unwrap())
    }

    /// Calls a method of a task.
    async fn on<R: Message + Default>(&self, method: &str, id: &str) -> Result<R, Failure> {
        let request = cd::ProcessRequest { id: id.into(), exec_id: String::new() };
        self.call(method, &request).await
    }
}
