//! The certificate that this engine presents, and the authorities that it trusts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::Settings;

/// The reason why a certificate or a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read, or is not PEM.
    #[error("{}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: PemError,
    },
    /// A file has no certificate.
    #[error("{}: no certificate in it", .0.display())]
    Empty(PathBuf),
    /// The key and the certificates do not belong together, or cannot be used.
    #[error("certificate, key or authority: {0}")]
    Unusable(#[from] rustls::Error),
    /// The authorities cannot be used.
    #[error("authority: {0}")]
    Authority(#[from] rustls::server::VerifierBuilderError),
}

/// The TLS configurations for handshakes. Cheap to clone.
#[derive(Clone)]
pub struct Identity {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl Identity {
    /// Reads the files that the settings name.
    ///
    /// # Errors
    /// [`IdentityError`], which names the file.
    pub fn load(settings: &Settings) -> Result<Self, IdentityError> {
        let chain = certificates(&settings.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&settings.key)
            .map_err(|error| IdentityError::File { path: settings.key.clone(), error })?;
        let mut roots = RootCertStore::empty();
        for root in certificates(&settings.authority)? {
            roots.add(root)?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(default_provider());

        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots.clone());
        let mut client = client.with_client_auth_cert(chain.clone(), key.clone_key())?;
        client.resumption = Resumption::disabled();

        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build()?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier);
        let mut server = server.with_single_cert(chain, key)?;
        // TLS must send nothing after the handshake: records follow.
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let failed = |error| IdentityError::File { path: path.into(), error };
    let file = CertificateDer::pem_file_iter(path).map_err(failed)?;
    let certificates = file.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    if certificates.is_empty() {
        return Err(IdentityError::Empty(path.into()));
    }
    Ok(certificates)
}
