#!/bin/sh
# Starts Redis with the users of users.acl; mesh and passwords are environment variables. Options of redis-server may follow.
set -eu
umask 077
# A here-document: shell variables are replaced, and nothing else of the file or of a password is interpreted.
eval "cat <<END
$(cat /etc/redis/users.acl)
END" >/tmp/users.acl
chown redis /tmp/users.acl
exec docker-entrypoint.sh redis-server --aclfile /tmp/users.acl "$@"
