#!/bin/sh
set -e
cat > /app/service.json <<'JSON'
{
  "listen": "127.0.0.1:8080",
  "notes": "/app/notes",
  "log": "/var/log/notes/service.log",
  "suffix": ".txt"
}
JSON
