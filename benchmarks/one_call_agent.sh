# An agent that makes one model call: as little as can be, so that the harness is what is measured.
address=${OPENAI_BASE_URL#http://}; host=${address%%/*}
body="{\"model\": \"$MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"$INSTRUCTION\"}]}"
exec 3<>"/dev/tcp/${host%%:*}/${host##*:}"
printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: %s\r\nConnection: close\r\n\r\n%s' \
    "$host" "$OPENAI_API_KEY" "${#body}" "$body" >&3
cat <&3
